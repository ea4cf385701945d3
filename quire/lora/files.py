"""Finds the files of adapters, and identifies adapters by their content. Does not import torch."""

from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from quire.checkpoints.hub import read_json, resolve
from quire.messages.lora import Adapter, LoRARequest
from quire.platform.files import check_regular

MOST_BYTES = 16 << 30  # size limit of an adapter's weights
_CONFIG, _HEADER = 1 << 20, 16 << 20  # size limits of the config, and of the tensors' names and shapes
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first existing file is used


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return the config and weight files. Raises ValueError if one is missing, too large or not a regular file."""
    check_regular(directory / CONFIG)
    for name in WEIGHTS:
        check_regular(directory / name)
    weights = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if weights is None or not (directory / CONFIG).is_file():
        raise ValueError(f"{directory} is no PEFT adapter: it needs {CONFIG} and {' or '.join(WEIGHTS)}")
    if (size := weights.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{weights} has {size / 2**30:.1f} GiB; an adapter may have {MOST_BYTES / 2**30:g} GiB")
    if weights.suffix == ".safetensors":
        with weights.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        if header > _HEADER:
            raise ValueError(f"{weights} has a header of {header:,} bytes; an adapter may have {_HEADER:,}")
    return directory / CONFIG, weights


def read_config(directory: Path) -> dict[str, Any]:
    """Return the fields of adapter_config.json. Raises ValueError."""
    return read_json(directory, CONFIG, required=True, most=_CONFIG)


def find_adapter(request: LoRARequest, download_dir: str | None = None, token: str | None = None) -> Adapter:
    """Return the adapter that a request names. Reads the files at the first call. Raises ValueError if there is no
    adapter."""
    directory = resolve(request.lora_path, download_dir=download_dir, token=token).resolve()
    files = adapter_files(directory)
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return Adapter(request.lora_name, _content(stamps), str(directory))


@lru_cache(maxsize=1024)
def _content(stamps: tuple[tuple[str, int, int], ...]) -> str:
    """Return the SHA-256 of the files' content. Sizes and times show whether files have changed."""
    digests = []
    for path, _, _ in stamps:
        with open(path, "rb") as stream:
            digests.append(file_digest(stream, "sha256").digest())
    return sha256(b"".join(digests)).hexdigest()
