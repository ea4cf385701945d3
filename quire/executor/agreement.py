"""The settings that must be equal on all machines of a cluster, as strings to compare."""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from quire._version import __version__
from quire.checkpoints.metadata import hf_config
from quire.cluster.messages import PROTOCOL
from quire.config.cluster import ClusterConfig
from quire.config.engine import GROUPS, OPTIONS, EngineConfig
from quire.executor.messages import as_data

# Options that each machine sets for itself. All others must be the same.
_OWN = {
    *OPTIONS[ClusterConfig], "model", "tokenizer", "download_dir", "hf_token", "chat_template",
    "kv_cache_memory_bytes", "gpu_memory_utilization", "kv_cache_pretouch", "kv_cache_layout", "cpu_isa",
    "speculative_config", "weight_cache", "weight_cache_size", "threads",
}  # fmt: skip
_PIECES, _PIECE_BYTES = 256, 4096  # of a model's weights that are read
_LONGEST_TEXT = 200


def facts(config: EngineConfig, directory: Path) -> dict[str, str]:
    """Return the settings that must be the same, by name. directory: of the model; it may differ between machines.

    config: the result of `with_files`.
    """
    drafter = dict(config.scheduler.speculative_config)
    own = drafter.pop("model", None)
    found = {
        "Quire's version": __version__,
        "the cluster's protocol": str(PROTOCOL),
        "the model's weights": "none" if config.model.load_format == "dummy" else weights_digest(directory),
        "the drafter's weights": weights_digest(Path(own)) if own and Path(own).exists() else str(own),
        "speculative_config": _text(drafter),
    }
    for name, value in hf_config(directory, {}).items():
        found[f"{name} in the model's config.json"] = _text(value)
    for group, options in GROUPS.items():
        for name in OPTIONS[options]:
            if name not in _OWN:
                found[name] = _text(getattr(getattr(config, group), name))
    return found


def versions() -> dict[str, str]:
    """Return the versions of packages that should be the same."""
    found = {}
    for package in ("torch", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def weights_digest(directory: Path) -> str:
    """Return a hash of the weight files' names and sizes, and of pieces of their content, without reading all of them.

    directory: of the model, or its GGUF file. Takes milliseconds for any size.
    """
    suffixes = (".safetensors", ".bin", ".pt", ".gguf")
    files = [directory] if directory.is_file() else sorted(f for f in directory.iterdir() if f.suffix in suffixes)
    digest = hashlib.sha256()
    count = max(2, _PIECES // max(1, len(files)))
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}\n".encode())
            last = max(0, size - _PIECE_BYTES)
            for number in range(count):
                file.seek(last * number // (count - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]


def _text(value: Any) -> str:
    """Return the value as JSON, or a hash of it if it is long."""
    text = msgspec.json.encode(value, order="deterministic", enc_hook=as_data)
    return text.decode() if len(text) <= _LONGEST_TEXT else hashlib.sha256(text).hexdigest()[:16]
