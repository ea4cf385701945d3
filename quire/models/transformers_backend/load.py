"""Loads a model with transformers, and replaces its attention with Quire's."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from quire.checkpoints.errors import WeightError
from quire.config.engine import ConfigError, EngineConfig
from quire.messages.errors import error_text
from quire.models.description import ModelDescription
from quire.models.transformers_backend import attention, probe
from quire.models.transformers_backend.model import TransformersModel
from quire.models.transformers_backend.spec import architecture, check_rotary, settings_of
from quire.observability.logging import logger
from quire.ops import Kernels
from quire.parallel.mesh import Communicator


def load_model(
    description: ModelDescription,
    config: EngineConfig,
    max_model_len: int,
    kernels: Kernels,
    group: Communicator,
    weights: Path | None,
) -> TransformersModel:
    """weights: the checkpoint's folder, None for random weights. Raises ConfigError for a model that cannot run on
    Quire's attention, and WeightError."""
    name = architecture(description.config)
    try:
        kind = getattr(transformers, name)
        settings = settings_of(description.config)
        if description.pooling is not None or (weights is not None and weights.is_file()):
            raise ValueError("it is a model that pools, or a GGUF file")
        if kind._is_stateful or not kind._supports_attention_backend:
            raise ValueError("its layers keep a state, or do not use transformers' attention interface")
        check_rotary(settings, max_model_len)
        recorder = probe.register()
        attention.register()
        network = _network(kind, settings, kernels.target.dtype, weights).to(kernels.target.device).eval()
        if network.base_model is network:
            raise ValueError("its layers cannot be told from its head")
        layers = probe.probe(network.base_model, settings.vocab_size, recorder, max_model_len)
    except WeightError:
        raise
    except ValueError as error:
        raise ConfigError(f"model_impl='transformers' cannot run {name}: {error_text(error)}") from error
    network.set_attn_implementation(attention.NAME)
    model = TransformersModel(network, layers, max_model_len, kernels, group)
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


def _network(kind: Any, settings: Any, dtype: torch.dtype, weights: Path | None) -> Any:
    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kind._from_config(settings, dtype=dtype, attn_implementation=probe.NAME)
    transformers_logging.disable_progress_bar()
    try:
        network, info = kind.from_pretrained(
            weights,
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
        if info.get(label):
            names = ", ".join(sorted(map(str, info[label]))[:5])
            raise WeightError(f"the checkpoint's tensors do not fit the model; {label.partition('_')[0]}: {names}")
    return network
