"""The packed weights of one rank's model: restored from the cache at start if possible, and written to it otherwise."""

import hashlib
import logging
import sys
import threading
from functools import cache
from glob import escape
from pathlib import Path

from quire.checkpoints.packed.forms import FormError, decode, encode
from quire.checkpoints.packed.packed_file import StoppedError, read, size_of, write
from quire.config.engine import EngineConfig
from quire.layers.build import Builder
from quire.messages.errors import error_text
from quire.ops.cpu.build import library
from quire.platform.folders import cache_folder
from quire.platform.kept_files import KeptFiles

logger = logging.getLogger("quire")

WORTHWHILE = 1 << 26  # bytes of weights; smaller models are packed quickly anyway
_OF_A_CHECKPOINT = {".safetensors", ".bin", ".pt", ".json", ".gguf"}
# The packages whose code converts a checkpoint's tensors to weights, or caches them
_PACKAGES = ("checkpoints", "layers", "models", "ops")


def open_cache(config: EngineConfig, directory: Path, builder: Builder) -> "WeightCache | None":
    """Return the cache for the weights of a builder whose slots have been declared, None if they should not be cached.

    directory: of the checkpoint, or its GGUF file.
    """
    options = config.weights
    folder = cache_folder()
    if not options.weight_cache or folder is None or sys.platform != "linux" or builder.device.type != "cpu":
        return None
    if config.parallel.enable_eplb:  # experts move between ranks
        return None
    if sum(slot.target.nbytes for slot in builder.slots if slot.is_raw) < WORTHWHILE:
        return None
    return WeightCache(
        KeptFiles(folder / "weights", options.weight_cache_size), _key(config, directory, builder), builder
    )


class WeightCache:
    """mapped: bytes of the file that contains the weights, 0 if they are not mapped from a file."""

    def __init__(self, folder: KeptFiles, key: str, builder: Builder) -> None:
        self._folder = folder
        self._key = key
        self._weights = builder.weights
        self._stopped = threading.Event()
        self.mapped = 0

    def restore(self) -> bool:
        """Restore the weights that an earlier start has cached. Returns False, and changes nothing, if there are
        none."""
        try:
            with self._folder.opened(self._key) as handle:
                kept, tensors = read(handle)
            values = decode(kept, tensors)
        except FileNotFoundError:
            return False
        except ValueError as error:
            logger.warning(
                "The kept weights in %s are damaged, and are made anew: %s", self._folder.path, error_text(error)
            )
            self._folder.delete(self._key)
            return False
        except OSError as error:
            logger.info("Weights that an earlier start has kept cannot be used: %s", error_text(error))
            return False
        for weight, value in zip(self._weights, values, strict=True):
            setattr(weight, weight.lasting, value)
        self.mapped = size_of(tensors)
        return True

    def keep(self) -> None:
        """Start writing the weights in a thread. They must not change before `stop` is called."""
        threading.Thread(target=self._keep, name="quire-weights").start()

    def stop(self) -> None:
        """Abort writing, because the weights are about to change."""
        self._stopped.set()

    def _keep(self) -> None:
        try:
            kept, tensors = encode([getattr(weight, weight.lasting) for weight in self._weights])
            size = size_of(tensors)
            self._folder.write(self._key, size, lambda handle: write(handle, kept, tensors, self._stopped.is_set))
        except StoppedError:
            return
        except (FormError, OSError) as error:
            logger.info("The packed weights are not kept for later starts: %s", error_text(error))


def _key(config: EngineConfig, directory: Path, builder: Builder) -> str:
    """Return a hash of everything that the weights depend on: the checkpoint's files, the part that this rank reads,
    the code and the kernels that pack and quantize it, and the related options.

    A checkpoint file is identified by its path, its size and its timestamps. The ctime cannot be set by programs, so it
    also detects files that were unpacked or copied there.
    """
    infos = [(path.resolve(), path.stat()) for path in _files(directory) if path.suffix in _OF_A_CHECKPOINT]
    kernels = library()
    model = config.model
    experts = builder.experts
    facts = [
        *((str(path), info.st_size, info.st_mtime_ns, info.st_ctime_ns) for path, info in infos),
        *((s.name, s.shape, s.pick, s.transposed, s.target.dtype, s.target.shape) for s in builder.slots if s.is_raw),
        [type(weight).__name__ for weight in builder.weights],
        _code(),
        None if kernels is None else kernels.identity,
        sorted(builder.kernels.chosen.items()),
        builder.dtype,
        model.quantization,
        sorted(model.hf_overrides.items()),
        config.parallel,
        builder.tensor_group.rank,
        None if experts is None else experts.group.rank,
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint's directory and its subfolders, or the parts of a GGUF file."""
    if directory.is_dir():
        return sorted([*directory.glob("*"), *directory.glob("*/*")])
    return sorted(directory.parent.glob(escape(directory.name).replace("-00001-of-", "-*-of-")))


@cache
def _code() -> str:
    """Return a hash of the sources of _PACKAGES."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for source in sorted(Path(__file__).parents[2].joinpath(package).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()
