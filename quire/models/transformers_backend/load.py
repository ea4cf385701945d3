"""Loads a model with transformers, and replaces its attention with Quire's."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from quire.checkpoints.errors import WeightError
from quire.config.engine import ConfigError, EngineConfig
from quire.layers.lora import AdapterSlots
from quire.messages.errors import error_text
from quire.models.description import ModelDescription
from quire.models.transformers_backend import attention, probe
from quire.models.transformers_backend.linear import LinearLayers
from quire.models.transformers_backend.model import TransformersModel
from quire.models.transformers_backend.quantized import QuantizedTensors, quantized_tensors
from quire.models.transformers_backend.spec import architecture, body_of, check_rotary, settings_of
from quire.models.transformers_backend.stages import choose_stage, cut
from quire.observability.logging import logger
from quire.ops import Kernels
from quire.parallel.mesh import Mesh
from quire.parallel.pipeline import Stage


def load_model(
    description: ModelDescription,
    config: EngineConfig,
    max_model_len: int,
    kernels: Kernels,
    mesh: Mesh,
    weights: Path | None,
    adapters: AdapterSlots | None = None,
) -> TransformersModel:
    """weights: the checkpoint's folder, None for random weights. Raises ConfigError for a model that cannot run on
    Quire's attention, and WeightError."""
    pools = description.pooling is not None
    name = (body_of(description.config) if pools else None) or architecture(description.config)
    try:
        kind = getattr(transformers, name)
        settings = settings_of(description.config)
        if weights is not None and weights.is_file():
            raise ValueError("it is a GGUF file")
        if kind._is_stateful or not kind._supports_attention_backend:
            raise ValueError("its layers keep a state, or do not use transformers' attention interface")
        check_rotary(settings, max_model_len)
        recorder = probe.register()
        attention.register()
        stored = None if weights is None else quantized_tensors(weights, description.config)
        network = _network(kind, settings, kernels.target.dtype, weights, stored).to(kernels.target.device).eval()
        if network.base_model is network and not pools:
            raise ValueError("its layers cannot be told from its head")
        step = attention.Step()
        linear = LinearLayers(kernels, mesh.tp, step, config.model.quantization, adapters, stored)
        linear.replace(network)
        layers = probe.probe(network.base_model, settings.vocab_size, recorder, max_model_len)
        stage = Stage(range(len(layers)))
        if mesh.pp.size > 1:
            stage = choose_stage(len(layers), config.parallel, mesh.pp.rank)
            cut(network.base_model, layers, stage)
            linear.drop_others(network if stage.has_head else network.base_model)
    except WeightError:
        raise
    except ValueError as error:
        raise ConfigError(f"model_impl='transformers' cannot run {name}: {error_text(error)}") from error
    network.set_attn_implementation(attention.NAME)
    model = TransformersModel(network, layers, linear, step, max_model_len, kernels, mesh.tp, adapters, stage)
    if not pools and stage.has_head:
        _check_head(model, name)
    logger.info("%s runs transformers' own code, which is slower than Quire's layers", name)
    return model


@torch.inference_mode()
def _check_head(model: TransformersModel, name: str) -> None:
    """Raises ConfigError for a head that needs other outputs of the layers than hidden states."""
    hidden = torch.zeros(1, model.hidden_size, dtype=model.kernels.target.dtype, device=model.kernels.target.device)
    try:
        model.logits(hidden)
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = f"its head cannot run without its layers ({error_text(error)})"
        raise ConfigError(f"model_impl='transformers' cannot run {name}: {problem}") from error


def _network(
    kind: Any, settings: Any, dtype: torch.dtype, weights: Path | None, stored: QuantizedTensors | None
) -> Any:
    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kind._from_config(settings, dtype=dtype, attn_implementation=probe.NAME)
    transformers_logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": weights if stored is None else None}
    if stored is not None:
        source["state_dict"] = stored.dense_tensors()
    try:
        network, info = kind.from_pretrained(
            **source,
            config=settings,
            dtype=dtype,
            attn_implementation=probe.NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise WeightError(f"transformers cannot load {weights}: {error_text(error)}") from error
    for label in ("missing_keys", "mismatched_keys", "error_msgs"):
        wrong = [name for name in info.get(label) or () if stored is None or not stored.has(str(name))]
        if wrong:
            names = ", ".join(sorted(map(str, wrong))[:5])
            raise WeightError(f"the checkpoint's tensors do not fit the model; {label.partition('_')[0]}: {names}")
    return network
