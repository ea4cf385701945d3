"""Models with image or audio input: a text model of another family, and the encoder of its media."""

from dataclasses import replace
from typing import Any

from quire.models.architectures.deepseek import mistral4
from quire.models.architectures.delta_net import qwen3_5, qwen3_5_moe
from quire.models.architectures.gemma import gemma
from quire.models.architectures.llama import hyperclovax, llama, ministral3, mistral
from quire.models.architectures.qwen import qwen2, qwen3, qwen3_vl_moe
from quire.models.spec import Architecture, DecoderSpec, HfConfig
from quire.multimodal.spec import MediaSpec

TEXT_MODELS: dict[str, Architecture] = {
    "hyperclovax": hyperclovax,
    "llama": llama,
    "mistral": mistral,
    "ministral3": ministral3,
    "mistral4": mistral4,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
UNUSED = r"^(model\.)?vision_tower\."  # layers after the last one that is read, and the pooler's head


def _text(config: HfConfig, default: str = "llama") -> DecoderSpec:
    """Return the spec of the text model. Raises ValueError for a family that does not support images."""
    text: dict[str, Any] = {**config["text_config"]}
    if (tied := config.get("tie_word_embeddings")) is not None:  # transformers also reads the field of the whole model
        text["tie_word_embeddings"] = tied
    kind = text.get("model_type", default)
    if kind not in TEXT_MODELS:
        raise ValueError(f"a model that sees with a text model {kind!r} is not supported: {', '.join(TEXT_MODELS)}")
    return TEXT_MODELS[kind](text)


def llava(config: HfConfig) -> DecoderSpec:
    """LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision, and models with the same structure: Pixtral and Mistral Small 3.1."""
    spec = _text(config, "mistral")
    family = "llava"
    if config["vision_config"].get("model_type") == "pixtral":
        family = "pixtral"
    elif config.get("model_type") in ("llava_next", "llava_onevision"):
        family = "llava_next"
    return replace(spec, media=MediaSpec(family, config), ignored=(*spec.ignored, UNUSED))


def hcx_vision_v2(config: HfConfig) -> DecoderSpec:
    """HyperCLOVA X Vision V2: the text model alone, without image input."""
    spec = _text(config, "hyperclovax")
    return replace(spec, ignored=(*spec.ignored, r"^(model\.)?(vision_(model|projector)|projector)\."))


def qwen_vl(config: HfConfig) -> DecoderSpec:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, the latter two also with experts. The first configs have the fields
    of the text model at the top level."""
    text = config.get("text_config") or {k: v for k, v in config.items() if k != "vision_config"}
    vision = config["vision_config"]
    kind = config.get("model_type", "qwen2_vl")
    is_deep = kind.startswith("qwen3_vl")
    family = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}.get(kind, kind)
    config = {**config, "text_config": {**text, "model_type": family}}
    levels = range(len(vision.get("deepstack_visual_indexes", (8, 16, 24)))) if is_deep else ()
    return replace(_text(config), media=MediaSpec("qwen_vl", config, tuple(levels)))


def qwen2_audio(config: HfConfig) -> DecoderSpec:
    """Qwen2-Audio. Its config leaves out sizes of the text model."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 32)
    config = {**config, "text_config": {"hidden_size": 4096, **sizes, **config["text_config"]}}
    return replace(_text(config, "qwen2"), media=MediaSpec("qwen2_audio", config))


def idefics3(config: HfConfig) -> DecoderSpec:
    """Idefics3 and SmolVLM."""
    return replace(_text(config), media=MediaSpec("idefics3", config))


def internvl(config: HfConfig) -> DecoderSpec:
    """InternVL 3 in transformers' format, whose names end with -hf."""
    spec = _text(config, "qwen2")
    return replace(spec, media=MediaSpec("internvl", config), ignored=(*spec.ignored, UNUSED))
