"""The fingerprint of an engine's KV blocks. Engines with equal fingerprints can exchange blocks."""

from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoints.metadata import hf_config
from quire.config.engine import EngineConfig

LAYOUT_VERSION = 1  # raise it when the meaning of a block's bytes changes


def cache_fingerprint(config: EngineConfig, directory: Path, layout: str, weights: Path | None = None) -> str:
    """Return, as JSON, everything except the tokens that determines a block's bytes. Equal settings give equal strings.

    directory: the model's directory or GGUF file. layout: see KVCacheSize. weights: the folder of replacement weights,
    if the model's own were replaced.
    """
    is_dummy = config.model.load_format == "dummy" and weights is None
    fields = {
        "weights": "dummy" if is_dummy else _weights(weights or directory),
        "config": hf_config(directory, config.model.hf_overrides),
        "quantization": config.model.quantization,
        "ranks": [
            config.parallel.pipeline_parallel_size,
            config.parallel.tensor_parallel_size,
            config.parallel.prefill_context_parallel_size,
            config.parallel.decode_context_parallel_size,
        ],
        "block_size": config.cache.block_size,
        "layout": [LAYOUT_VERSION, layout],
    }
    if config.model.model_impl == "transformers":
        fields["model_impl"] = "transformers"
    drafter = config.scheduler.speculation
    if drafter is not None and drafter.on_device:  # its entries are also in the blocks
        fields["drafter"] = [drafter.method, _weights(Path(drafter.model)) if drafter.model else None]
    return msgspec.json.encode(fields, order="deterministic").decode()


def _weights(directory: Path) -> Any:
    """Return an identity of the weights without reading them. Copies of equal weights may have different identities.

    A model from the hub is identified by its name and commit (models--owner--name/snapshots/commit), any other model by
    the path, sizes and modification times of its files.
    """
    if directory.parent.name == "snapshots":
        return [directory.parent.parent.name, directory.name]
    place = directory.resolve()
    files = sorted(file for file in (place.iterdir() if place.is_dir() else [place]) if file.is_file())
    return [str(place), [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
