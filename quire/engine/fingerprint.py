"""What makes the KV blocks of two engines interchangeable."""

from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.loading.metadata import hf_config

LAYOUT_VERSION = 1  # to be raised when the bytes of a block mean something else than before


def cache_fingerprint(config: EngineConfig, directory: Path, layout: str) -> str:
    """All that decides a block's bytes besides its tokens, as JSON. Equal for equal settings, in any process.

    directory: of the model, or its GGUF file. layout: see KVCacheSize.
    """
    fields = {
        "weights": "dummy" if config.model.load_format == "dummy" else _weights(directory),
        "config": hf_config(directory, config.model.hf_overrides),
        "quantization": config.model.quantization,
        "ranks": config.parallel.tensor_parallel_size,
        "block_size": config.cache.block_size,
        "layout": [LAYOUT_VERSION, layout],
    }
    return msgspec.json.encode(fields, order="deterministic").decode()


def _weights(directory: Path) -> Any:
    """The identity of the weights, without reading them: equal ones may differ, but different ones are never equal.

    A model of the hub is known by its name and commit (models--owner--name/snapshots/commit). Of any other, the place,
    sizes and times of the files count.
    """
    if directory.parent.name == "snapshots":
        return [directory.parent.parent.name, directory.name]
    place = directory.resolve()
    files = sorted(file for file in (place.iterdir() if place.is_dir() else [place]) if file.is_file())
    return [str(place), [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
