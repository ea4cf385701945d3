"""Describes a model of transformers for the engine before it is loaded."""

from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.messages.errors import error_text
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def architecture(config: HfConfig) -> str:
    """Return the name of transformers' class. Raises ValueError if there is no class that generates."""
    names = config.get("architectures") or []
    for name in names:
        if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return str(name)
    shared = _class_of_another_family(config.get("model_type"))
    if shared is not None and any(name.endswith("ForCausalLM") for name in names):
        return shared
    wanted = ", ".join(names) or "(none named in config.json)"
    message = f"transformers {transformers.__version__} has no causal language model {wanted}"
    if config.get("auto_map"):
        message += "; the checkpoint brings code of its own, which Quire never runs"
    raise ValueError(message)


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
    if config.get("quantization_config"):
        raise ValueError("model_impl='transformers' cannot run quantized checkpoints")
    kind = CONFIG_MAPPING[config["model_type"]]
    if kind.sub_configs:
        raise ValueError(f"model_impl='transformers' runs models of text only, which {name} is not")
    try:
        settings = kind.from_dict(dict(config))
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
