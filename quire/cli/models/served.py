"""The models of `quire serve` with several models, and the memory that each needs on this machine."""

import math
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.hub import local_model
from quire.cli.models.cache import cached_models, complete_snapshot
from quire.cli.models.facts import facts_of
from quire.cli.models.short_names import created_model, resolve_name
from quire.config.engine import ConfigError, EngineConfig, ServerConfig
from quire.platform.limits import free_on_host, has_gpu_driver
from quire.server.multimodel.declarations import ModelDeclaration, read_models
from quire.server.multimodel.memory import Machine, Need

_PROCESS_BYTES = 240 << 20  # of a core's process without weights, until it is measured
_LEAST_TOKENS = 2048  # for which the KV cache of a model should have room, at least
_LEAST_CACHE = 16 << 20
_ROWS = 16  # requests of the longest length for which a KV cache may have room
_SLACK = 1.05  # blocks are larger than what a request needs


def declared_models(models: Sequence[str], config: ServerConfig, options: Mapping[str, Any]) -> list[ModelDeclaration]:
    """Return the models given on the command line and in the file of --models. options: for all of them. Raises
    ConfigError or OSError."""
    resolve = partial(_resolve, download_dir=options.get("download_dir"))
    given = [_given(name, resolve, options, config.model_ttl) for name in models]
    if config.models is None:
        return given
    return [*given, *read_models(Path(config.models), options, config.model_ttl, resolve)]


def found_models(config: ServerConfig, options: Mapping[str, Any]) -> list[ModelDeclaration]:
    """Return the models of --models-dir and --pulled-models that are there at the moment. Raises OSError."""
    found: dict[str, str] = {}
    if config.models_dir is not None:
        found |= {name: str(path) for name, path in _in_folder(Path(config.models_dir))}
    if config.pulled_models:
        found |= dict(_pulled(options.get("download_dir")))
    declared = []
    for name, model in found.items():
        declared.append(ModelDeclaration.create(name, model, options, ttl=config.model_ttl, is_found=True))
    return declared


def _given(
    name: str, resolve: Callable[[str], str | None], options: Mapping[str, Any], ttl: float | None
) -> ModelDeclaration:
    """Declare a model of the command line. Its names are that of its folder or file, and the given one."""
    model = resolve(name)
    names = [name]
    if model is not None and local_model(model) is not None:
        names = [Path(name).stem if name.endswith(".gguf") else Path(name).name, name]
    elif model is not None:
        names = [model, name]
    first, *others = dict.fromkeys(names)
    return ModelDeclaration.create(first, model, options, aliases=others, ttl=ttl)


def _resolve(name: str, download_dir: str | None) -> str | None:
    """Return the path or repository of a name, None for the bundled model. Raises ValueError for an unknown name."""
    created = created_model(name, download_dir)
    return created.base if created is not None else resolve_name(name)


def _in_folder(folder: Path) -> Iterable[tuple[str, Path]]:
    """Yield the checkpoints and GGUF files of a folder, with their names."""
    if not folder.is_dir():
        raise ConfigError(f"models_dir: there is no folder {folder}")
    for path in sorted(folder.iterdir()):
        if path.suffix == ".gguf" and path.is_file():
            yield path.stem, path
        elif path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf"))):
            yield path.name, path


def _pulled(download_dir: str | None) -> Iterable[tuple[str, str]]:
    for model in cached_models(download_dir):
        try:
            snapshot = complete_snapshot(model.name, None, download_dir)
            if snapshot is None or facts_of(snapshot).problem is not None:
                continue
        except (ModelNotFoundError, ValueError, OSError):
            continue  # not a model that Quire can run
        yield model.name, model.name


def this_machine(config: ServerConfig, options: Mapping[str, Any]) -> Machine:
    """Return the memory for models on this machine: of its GPU, or of the host."""
    on_gpu = options.get("device") != "cpu" and has_gpu_driver()
    gpu = _gpu_memory() if on_gpu else None
    if gpu is not None:
        return Machine(config.memory or gpu, partial(_need_of_gpu, gpu))
    return Machine(config.memory or free_on_host(), need)


def _gpu_memory() -> int | None:
    """Return the bytes of the first GPU; None if the driver's tool does not tell."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return int(answer.stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _need_of_gpu(total: int, directory: Path, config: EngineConfig) -> Need:
    """An engine takes a fixed share of a GPU."""
    return Need(int(config.cache.gpu_memory_utilization * total), is_fixed=True)


def need(directory: Path, config: EngineConfig) -> Need:
    """Estimate the memory of a model on a CPU. directory: its folder or GGUF file."""
    facts = facts_of(directory)
    cores = config.parallel.data_parallel_size
    given = config.cache.kv_cache_memory_bytes
    process = _PROCESS_BYTES * cores * config.parallel.ranks
    footprint = facts.footprint
    if footprint is None:
        cache = given or _LEAST_CACHE * 16
        return Need(facts.file_bytes * cores, process, cache * cores, cache * cores, cache * cores, given is not None)
    quantization = config.model.quantization if config.model.quantization in footprint.quantizations else None
    weights = math.ceil(footprint.weights(quantization)[0])
    if given is not None:
        return Need(weights * cores, process, given * cores, given * cores, is_fixed=True)
    length = config.model.max_model_len
    longest = footprint.spec.max_positions if length in (None, -1) else int(length or 0)
    whole = int(footprint.cache(longest) * _SLACK) + _LEAST_CACHE
    if footprint.cache(longest) == 0:
        return Need(weights * cores, process)
    few = int(footprint.cache(min(longest, _LEAST_TOKENS)) * _SLACK) + _LEAST_CACHE
    least = few if length in (None, -1) else whole
    rows = min(config.scheduler.max_num_seqs or _ROWS, _ROWS)
    return Need(weights * cores, process, least * cores, max(least, whole * rows) * cores, whole * cores)
