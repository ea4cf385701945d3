"""The form in which schemes and families read a checkpoint's tensors."""

from collections.abc import Mapping
from typing import Any

from quire.checkpoints import merged_adapter, nomic
from quire.checkpoints.bitsandbytes import BitsAndBytesCheckpoint
from quire.checkpoints.formats.config import quantization_kind
from quire.checkpoints.mxfp4 import Mxfp4Checkpoint
from quire.checkpoints.normed_head import NormedHeadCheckpoint
from quire.checkpoints.rwkv import PACKED, RwkvCheckpoint
from quire.checkpoints.weights import Checkpoint


def presented(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint converted to the form that the schemes read, if necessary."""
    if any(name.endswith("_blocks") for name in checkpoint.names):
        return Mxfp4Checkpoint(checkpoint)
    if config.get("norm_head"):
        return NormedHeadCheckpoint(checkpoint)
    if any(name.endswith(PACKED) for name in checkpoint.names):
        return RwkvCheckpoint(checkpoint)
    if any(name.endswith(merged_adapter.ORIGINAL) for name in checkpoint.names):
        return merged_adapter.with_parametrization(checkpoint, config)
    if config.get("num_experts") and any(name.endswith(nomic.ROWS) for name in checkpoint.names):
        return nomic.with_experts(checkpoint, config)
    if quantization_kind(config) == "bitsandbytes":
        return BitsAndBytesCheckpoint(checkpoint)
    if quantization_kind(config) == "torchao":
        from quire.checkpoints.formats.torchao import TorchaoCheckpoint

        return TorchaoCheckpoint(checkpoint)
    return checkpoint
