"""Describes a model of transformers for the engine before it is loaded."""

import re
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from quire.messages.errors import error_text
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec

_QUANTIZATION = ("quantization_config", "compression_config")
_POOLED = re.compile(r"(?<!LMHead)Model$|For(SequenceClassification|TokenClassification|RewardModel)$")


def architecture(config: HfConfig) -> str:
    """Return the name of transformers' class: one that generates or, for a checkpoint without a head or with that of a
    classifier, the layers alone. Raises ValueError if there is none."""
    names = config.get("architectures") or []
    for name in names:
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return str(name)
    shared = _class_of_another_family(config.get("model_type"))
    if shared is not None and any(name.endswith("ForCausalLM") for name in names):
        return shared
    if any(_POOLED.search(name) for name in names) and (body := body_of(config)) is not None:
        return body
    wanted = ", ".join(names) or "(none named in config.json)"
    message = f"transformers {transformers.__version__} has no causal language model {wanted}"
    if config.get("auto_map"):
        message += "; the checkpoint brings code of its own, which Quire never runs"
    raise ValueError(message)


def body_of(config: HfConfig) -> str | None:
    """Return the name of transformers' class of a model's layers without a head, None if there is none."""
    model_type = config.get("model_type")
    name = MODEL_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    return name if isinstance(name, str) else None


def _class_of_another_family(model_type: Any) -> str | None:
    """Return the class that runs a model type without a class of its own, such as Llama's for EXAONE."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if name is None or model_type not in CONFIG_MAPPING:
        return None
    return None if getattr(transformers, name).config_class is CONFIG_MAPPING[model_type] else str(name)


def settings_of(config: HfConfig) -> Any:
    """Return transformers' own config. Raises ValueError if the model cannot run on Quire's attention."""
    name = architecture(config)
    if config.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} has no model_type {config.get('model_type')!r}")
    kind = CONFIG_MAPPING[config["model_type"]]
    if kind.sub_configs:
        raise ValueError(f"model_impl='transformers' runs models of text only, which {name} is not")
    try:
        # Quire's own layers read quantized weights
        settings = kind.from_dict({name: value for name, value in config.items() if name not in _QUANTIZATION})
    except Exception as error:  # its validators raise many kinds
        raise ValueError(f"transformers cannot read config.json: {error_text(error)}") from error
    if settings.is_encoder_decoder:
        raise ValueError(f"model_impl='transformers' cannot run {name}, which has an encoder")
    return settings


def spec_of(config: HfConfig) -> DecoderSpec:
    """Return the sizes of the model. Its layers are described as standard ones: probe.py finds their real properties by
    running them. Raises ValueError."""
    settings = settings_of(config)
    sizes = {}
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        sizes[name] = getattr(settings, name, None)
        if not isinstance(sizes[name], int):
            raise ValueError(f"model_impl='transformers' needs a number as {name} in config.json, got {sizes[name]!r}")
    positions = getattr(settings, "max_position_embeddings", None) or 2048
    rest = {"intermediate_size": 4 * settings.hidden_size, "max_position_embeddings": positions}
    return decoder_spec({**sizes, **rest}, rotary=None)


def check_rotary(settings: Any, max_model_len: int) -> None:
    """Raises ValueError if rotary angles depend on the longest text of a step, which may be another request's."""
    parameters: dict[str, Any] = getattr(settings, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer or [parameters]:
        name = "original_max_position_embeddings"
        original = rope.get(name) or getattr(settings, name, None)
        longest = int(original or getattr(settings, "max_position_embeddings", 0) or 0)
        if rope.get("rope_type") in ("dynamic", "longrope") and max_model_len > longest:
            raise ValueError(
                f"model_impl='transformers' cannot use {rope['rope_type']} scaling, which depends on the "
                f"longest text of a batch; set max_model_len to at most {longest}"
            )
