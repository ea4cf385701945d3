"""A model on this rank: spec, layers, weights."""

from pathlib import Path
from typing import Any

import torch

from quire.config import ConfigError, EngineConfig
from quire.layers.build import Builder
from quire.loading.gguf import read_gguf
from quire.loading.gguf_models import gguf_checkpoint, gguf_config, gguf_generation_config
from quire.loading.hub import read_json
from quire.loading.mxfp4 import Mxfp4Checkpoint
from quire.loading.weights import Checkpoint, load_dummy, load_weights, open_checkpoint
from quire.models.decoder import Decoder
from quire.models.registry import spec_of
from quire.ops import Kernels, Target
from quire.ops.cpu.build import choose_instruction_set, find_compiler
from quire.parallel.mesh import TensorGroup
from quire.quantization.at_load import quantizer_of
from quire.quantization.config import extra_tensors, quantization_method
from quire.text.tokenizer import Tokenizer


def hf_config(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's config.json, or what a GGUF file has in its place, with the user's overrides."""
    config = gguf_config(read_gguf(path)) if path.is_file() else read_json(path, "config.json", required=True)
    return {**config, **overrides}


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(path).metadata) if path.is_file() else Tokenizer.from_directory(path)


def load_generation_config(path: Path) -> dict[str, Any]:
    return gguf_generation_config(read_gguf(path)) if path.is_file() else read_json(path, "generation_config.json")


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
    """Build the decoder that the config of the directory, or GGUF file, describes and fill its parameters."""
    description = hf_config(directory, config.model.hf_overrides)
    spec = spec_of(description)
    target = Target(device, resolve_dtype(config.model.dtype))
    checkpoint: Checkpoint | None = None
    if directory.is_file():
        checkpoint = gguf = gguf_checkpoint(read_gguf(directory))
        method_of = gguf.linear_method()
    elif config.model.load_format == "dummy":
        method_of = quantization_method(description)
    else:
        checkpoint = open_checkpoint(directory)
        if any(name.endswith("_blocks") for name in checkpoint.names):
            checkpoint = Mxfp4Checkpoint(checkpoint)
        method_of = quantization_method(description, checkpoint.has)
    choose_instruction_set(config.kernels.cpu_isa)
    kernels = Kernels(target, config.kernels.kernels)
    if config.model.torch_compile:
        if device.type == "cpu" and find_compiler() is None:
            raise ConfigError("torch_compile needs a C++ compiler; install g++, or leave torch_compile out")
        kernels.hide_from_compiler()
    builder = Builder(kernels, group, method_of, quantizer_of(config.model.quantization, spec.names))
    model = Decoder(builder, spec, max_model_len)
    if checkpoint is None:
        load_dummy(builder, show_progress)
    else:
        tied = (rf"{spec.names['lm_head']}\.weight$",) if spec.tie_embeddings else ()
        ignored = (*spec.ignored, *extra_tensors(description), *tied)
        load_weights(checkpoint, builder, ignored, show_progress)
    return model
