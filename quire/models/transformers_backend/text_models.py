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


def _interleaved(text: Any, parameters: Any = None) -> Any:
    """Return rotary parameters with what these models do without saying so. parameters: None for those of all
    layers."""
    parameters = parameters or text.rope_parameters
    pairs = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2
    _, *sections = parameters.get("mrope_section") or (24, 20, 20)
    height, width = (len(range(axis, min(3 * size, pairs), 3)) for axis, size in enumerate(sections, 1))
    return {**parameters, "mrope_section": [pairs - height - width, height, width], "mrope_interleaved": True}


def _by_kind(text: Any) -> dict[str, Any]:
    return {kind: given and _interleaved(text, given) for kind, given in text.rope_parameters.items()}


# Text models that Quire does not have by the name of a class that generates alone: one with the same layers, and the
# fields that make it so.
_SAME: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "glm4v_text": ("Glm4ForCausalLM", lambda text: {"attention_bias": True, **_rotated(text)}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", lambda text: _rotated(text)),
    "glm_ocr_text": ("Glm4ForCausalLM", lambda text: {"attention_bias": False, **_rotated(text)}),
    "paddleocr_vl_text": (
        "LlamaForCausalLM",
        lambda text: {"attention_bias": bool(text.use_bias), "mlp_bias": bool(text.use_bias)},
    ),
    "cohere_compass_text": ("CohereCompassText", lambda text: {"rope_parameters": _by_kind(text)}),
    "cosmos3_edge_text": ("Cosmos3EdgeText", lambda text: {"rope_parameters": _interleaved(text)}),
    "granite4_vision_text": ("GraniteForCausalLM", lambda text: {}),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", lambda text: {}),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", lambda text: {"rope_parameters": _interleaved(text)}),
}
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
    """Return transformers' config of the model that generates. Raises ValueError."""
    plain = {name: value for name, value in translated(config).items() if name != "quantization_config"}
    try:
        kind = CONFIG_MAPPING[plain["model_type"]]
        return kind.from_dict(kind._decode_special_floats(plain))
    except Exception as error:  # its validators raise many kinds
        raise ValueError(f"transformers cannot read config.json: {error_text(error)}") from error


def further_layers(config: dict[str, Any]) -> list[int]:
    """Return the layers to whose results further features of pictures are added: -1 for the embeddings."""
    settings = settings_of(config)
    if taps := getattr(settings, "deepstack_layer_map", None):
        before = [*(layer for _, layer in taps), *settings.spatial_target_layers]  # the layers that read the sums
        return [layer - 1 for layer in dict.fromkeys(before)]
    vision = getattr(settings, "vision_config", None)
    return list(range(len(getattr(vision, "deepstack_visual_indexes", None) or ())))


def has_sections(config: dict[str, Any]) -> bool:
    """Whether a token of the text model has several rotary positions."""
    text = text_model(config) or settings_of(config).get_text_config(decoder=True).to_dict()
    return "mrope_section" in str(text.get("rope_parameters"))


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
    settings = settings_of(config)
    text = settings.get_text_config(decoder=True)
    if text is settings or settings.is_encoder_decoder:
        return None
    made: dict[str, Any] = text.to_dict()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if text.model_type in _SAME:
        name, differences = _SAME[text.model_type]
        made = {"head_dim": text.hidden_size // text.num_attention_heads, **made, **differences(text)}
    if name is None:
        return None
    if config.get("quantization_config"):
        made["quantization_config"] = config["quantization_config"]
    return {**made, "architectures": [name]}
