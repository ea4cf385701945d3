"""The text model inside a model that sees or hears."""

import contextlib
from collections.abc import Callable
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from quire.messages.errors import error_text
from quire.models.transformers_backend.published import translated
from quire.models.transformers_backend.spec import architecture


def _rotated(text: Any) -> dict[str, Any]:
    return {"partial_rotary_factor": text.rope_parameters.get("partial_rotary_factor", 1.0)}


# Text models without a class that generates alone: one with the same layers, and the fields that make it so.
_SAME: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "cosmos3_edge_text": (
        "ArceeForCausalLM",
        lambda text: {"rope_parameters": {**text.rope_parameters, "mrope_interleaved": True}},
    ),
    "glm4v_text": ("Glm4ForCausalLM", lambda text: {"attention_bias": True, **_rotated(text)}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", lambda text: _rotated(text)),
    "glm_ocr_text": ("Glm4ForCausalLM", lambda text: {"attention_bias": False, **_rotated(text)}),
    "paddleocr_vl_text": (
        "LlamaForCausalLM",
        lambda text: {"attention_bias": bool(text.use_bias), "mlp_bias": bool(text.use_bias)},
    ),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", lambda text: {}),
}
# Models in which tokens of a prompt also see those behind them, by their type.
_TWO_WAY = {"paligemma"}
_NAMES = {
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,  # some that hear are only here
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}


def class_of(config: dict[str, Any]) -> str | None:
    """Return the name of transformers' class that generates from the checkpoint's pictures or sounds."""
    config = translated(config)
    listed = config.get("architectures") or []
    own = _NAMES.get(str(config.get("model_type")))
    return own if own is not None and (own in listed or any(name in _NAMES.values() for name in listed)) else None


def settings_of(config: dict[str, Any]) -> Any:
    """Return transformers' config of a whole checkpoint. Raises ValueError."""
    plain = {name: value for name, value in translated(config).items() if name != "quantization_config"}
    try:
        kind = CONFIG_MAPPING[plain["model_type"]]
        return kind.from_dict(kind._decode_special_floats(plain))
    except Exception as error:  # its validators raise many kinds
        raise ValueError(f"transformers cannot read config.json: {error_text(error)}") from error


def has_sections(config: dict[str, Any]) -> bool:
    """Whether a token of the text model has several rotary positions."""
    return "mrope_section" in str(getattr(settings_of(config).get_text_config(decoder=True), "rope_parameters", None))


def is_text_model(config: dict[str, Any]) -> bool:
    """Whether transformers has a causal language model with the name of a checkpoint's architecture."""
    with contextlib.suppress(ValueError):
        return bool(architecture(config))
    return False


def text_model(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of a checkpoint's text model, with all defaults and its architecture. None if transformers has
    no such model that sees or hears, or no text model of this kind. Raises ValueError."""
    if class_of(config) is None:
        return None
    if config.get("model_type") in _TWO_WAY:
        raise ValueError("the tokens of its prompts also see those behind them")
    settings = settings_of(config)
    text = settings.get_text_config(decoder=True)
    if text is settings or settings.is_encoder_decoder:
        return None
    made: dict[str, Any] = text.to_dict()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if name is None and text.model_type in _SAME:
        name, differences = _SAME[text.model_type]
        made = {"head_dim": text.hidden_size // text.num_attention_heads, **made, **differences(text)}
    if name is None:
        return None
    if config.get("quantization_config"):
        made["quantization_config"] = config["quantization_config"]
    return {**made, "architectures": [name]}
