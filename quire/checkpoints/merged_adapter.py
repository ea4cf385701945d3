"""Checkpoints that bring adapters for several tasks, one of which is added to the weights (Jina's embedding models)."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.checkpoints.computed import ComputedCheckpoint, Read, reader
from quire.checkpoints.hub import read_json
from quire.checkpoints.weights import Checkpoint, open_checkpoint
from quire.config.engine import ConfigError

ORIGINAL = ".parametrizations.weight.original"  # ends the names of the weights without an adapter
_FACTORS = (".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B")
_V3_TASK = "text-matching"  # vLLM's choices
_V5_TASK = "retrieval"


def _task(config: Mapping[str, Any], known: list[str], default: str) -> str:
    task = config.get("jina_task", default)
    if task not in known:
        raise ConfigError(f"hf_overrides: jina_task must be one of {', '.join(known)}, got {task!r}")
    return str(task)


def _added(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """a: [rank, in] and b: [out, rank], or for an embedding, a: [rows, rank] and b: [rank, width]"""
    product = b.float() @ a.float() if a.shape[0] == b.shape[1] else a.float() @ b.float()
    return (base.float() + scale * product.view(base.shape)).to(base.dtype)


def with_parametrization(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of jina-embeddings-v3, whose tensors have the factors of all tasks. Raises ConfigError."""
    known = list(config.get("lora_adaptations") or [_V3_TASK])
    index = known.index(_task(config, known, _V3_TASK))
    scale = float(config.get("lora_alpha", 1)) / float(config.get("lora_rank", 4))

    def merged(read: Read, root: str) -> Tensor:
        a, b = (read(root + factor, slice(index, index + 1))[0] for factor in _FACTORS)
        return _added(read(root + ORIGINAL), a, b, scale)

    roots = [name.removesuffix(ORIGINAL) for name in checkpoint.names if name.endswith(ORIGINAL)]
    hidden = frozenset(root + part for root in roots for part in (ORIGINAL, *_FACTORS))
    return ComputedCheckpoint(checkpoint, {f"{root}.weight": partial(merged, root=root) for root in roots}, hidden)


def with_adapter(checkpoint: Checkpoint, directory: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of jina-embeddings-v5, which has a folder with an adapter for each task, in peft's format.
    Raises ConfigError."""
    known = sorted(folder.name for folder in (directory / "adapters").glob("*") if folder.is_dir())
    folder = directory / "adapters" / _task(config, known, _V5_TASK)
    fields = read_json(folder, "adapter_config.json")
    adapter = open_checkpoint(folder)
    scale = float(fields["lora_alpha"]) / float(fields["r"])

    def merged(read: Read, name: str, root: str) -> Tensor:
        a, b = (reader(adapter)(f"{root}.lora_{factor}.weight") for factor in "AB")
        return _added(read(name), a, b, scale)

    roots = [name.removesuffix(".lora_A.weight") for name in adapter.names if name.endswith(".lora_A.weight")]
    names = {root: checkpoint.alias(f"model.{root.split('model.')[-1]}.weight") for root in roots}
    return ComputedCheckpoint(checkpoint, {names[root]: partial(merged, name=names[root], root=root) for root in roots})
