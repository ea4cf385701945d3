"""A model on this rank: spec, layers, weights."""

from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.layers.build import Builder
from quire.loading.hub import read_json
from quire.loading.weights import load_dummy, load_safetensors
from quire.models.decoder import Decoder
from quire.models.registry import spec_of
from quire.ops import Kernels, Target
from quire.parallel.mesh import TensorGroup


def hf_config(directory: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's config.json with the user's overrides."""
    return {**read_json(directory, "config.json", required=True), **overrides}


def resolve_dtype(option: str) -> torch.dtype:
    """auto: bfloat16, whatever the checkpoint's type is; processors compute float16 slowly."""
    dtype: torch.dtype = torch.bfloat16 if option == "auto" else getattr(torch, option)
    return dtype


def load_model(
    directory: Path,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
    group: TensorGroup,
    show_progress: bool,
) -> Decoder:
    """Build the decoder that the directory's config.json describes and fill its parameters."""
    description = hf_config(directory, config.model.hf_overrides)
    spec = spec_of(description)
    target = Target(device, resolve_dtype(config.model.dtype))
    builder = Builder(Kernels(target, config.kernels.kernels), group)
    model = Decoder(builder, spec, max_model_len)
    if config.model.load_format == "dummy":
        load_dummy(builder.slots, show_progress)
    else:
        ignored = spec.ignored + ((spec.names["lm_head"],) if spec.tie_embeddings else ())
        load_safetensors(directory, builder.slots, ignored, show_progress)
    builder.finish()
    return model
