"""Loads a drafter: a draft model, or a head that reads hidden states of the target model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.checkpoints.formats.at_load import quantizer_of
from quire.checkpoints.formats.config import extra_tensors, quantization_method
from quire.checkpoints.hub import read_json
from quire.checkpoints.metadata import hf_config
from quire.checkpoints.weights import load_dummy, load_weights, open_checkpoint
from quire.config.engine import ConfigError, EngineConfig
from quire.config.speculative import SpeculativeOptions
from quire.layers.build import Builder
from quire.models.decoder import Decoder
from quire.models.heads.head import ChainHead, StateHead
from quire.models.heads.registry import HEADS, MTP_HEADS
from quire.models.load import load_model
from quire.models.model import Model
from quire.models.spec import HfConfig
from quire.parallel.mesh import Communicator, Mesh


def load_draft_model(
    options: SpeculativeOptions, config: EngineConfig, max_model_len: int, device: torch.device, group: Communicator
) -> Model:
    """Load a draft model in the target model's dtype. Raises ConfigError, or an error from loading it."""
    model = replace(
        config.model,
        model=options.model,
        tokenizer=None,
        quantization=options.quantization,
        hf_overrides={},
        max_model_len=None,
    )
    group = Communicator() if options.draft_tensor_parallel_size == 1 else group
    mesh = Mesh(tp=group)  # it is whole on the last stage of a pipeline
    config = replace(config, model=model)
    return load_model(Path(str(options.model)), config, max_model_len, device, mesh, False).model


def load_head(
    options: SpeculativeOptions,
    config: EngineConfig,
    directory: Path,
    target: Model,
    max_model_len: int,
    group: Communicator,
) -> ChainHead | StateHead:
    """Load the head that the options name. directory: of the target model. Raises ConfigError, or an error from
    loading."""
    assert isinstance(target, Decoder), "every model of the registry is a Decoder"
    is_mtp = options.method == "mtp"
    place = directory if is_mtp else Path(str(options.model))
    if place.is_file():
        raise ConfigError(f"speculative_config: a head cannot be read from {place.name}; give a checkpoint's directory")
    fields = (
        hf_config(directory, config.model.hf_overrides) if is_mtp else _given(read_json(place, "config.json", True))
    )
    maker = MTP_HEADS.get((fields.get("architectures") or [""])[0]) if is_mtp else HEADS[str(options.method)]
    if maker is None:
        raise ConfigError(f"speculative_config: {fields['architectures'][0]} has no multi-token prediction here")
    checkpoint = None if config.model.load_format == "dummy" else open_checkpoint(place)
    method_of = quantization_method(fields, None if checkpoint is None else checkpoint.has)
    # A head has few weights, and a wrong draft costs a step, so 4 bits are not worth it.
    quantization = "int8" if config.model.quantization in ("int8", "int4") else None
    quantizer = quantizer_of(quantization, {})
    if checkpoint is None:
        builder = Builder(target.kernels, group, method_of, quantizer)
    else:
        builder = Builder(target.kernels, group, method_of, quantizer, shape_of=checkpoint.shape_of)
    has = checkpoint.has if checkpoint is not None else lambda name: is_mtp
    try:
        head = maker(builder, fields, target, has, max_model_len)
    except KeyError as missing:
        message = f"speculative_config: config.json of the {options.method} head has no value of {missing.args[0]!r}"
        raise ConfigError(message) from missing
    if checkpoint is None:
        load_dummy(builder, False)
    else:
        load_weights(checkpoint, builder, (*head.ignored, *extra_tensors(fields)), False)
    return head


def _given(fields: HfConfig) -> dict[str, Any]:
    """Return the fields of a config that are not null. A null field is treated as missing."""
    kept = {name: value for name, value in fields.items() if value is not None}
    return {name: _given(value) if isinstance(value, dict) else value for name, value in kept.items()}
