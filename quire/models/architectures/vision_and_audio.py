"""Models with image or audio input: a text model of another family, and the encoder of its media."""

from dataclasses import replace
from typing import Any

from quire.models.architectures.deepseek import mistral4
from quire.models.architectures.delta_net import qwen3_5, qwen3_5_moe
from quire.models.architectures.gemma import gemma
from quire.models.architectures.gpt_oss import gpt_oss
from quire.models.architectures.llama import arcee, hyperclovax, internlm2, llama, ministral3, mistral
from quire.models.architectures.phi import phi3
from quire.models.architectures.qwen import qwen2, qwen3, qwen3_moe, qwen3_vl_moe
from quire.models.spec import Architecture, DecoderSpec, HfConfig
from quire.multimodal.spec import MediaSpec

TEXT_MODELS: dict[str, Architecture] = {
    "gpt_oss": gpt_oss,
    "hyperclovax": hyperclovax,
    "internlm2": internlm2,
    "llama": llama,
    "mistral": mistral,
    "ministral3": ministral3,
    "mistral4": mistral4,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gemma": gemma,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
_OF_INTERN_VIT = (  # the names of transformers, and the original ones
    (r"^vision_tower\.", "vision_model."),
    (r"cls_token$", "class_embedding"),
    (r"position_embeddings$", "position_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_", "ls"),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.", "attn."),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)
# The tensors of Cosmos 3 that generate pictures, sounds and actions
_OF_GENERATION = (
    r"_moe_gen\b|\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.|_quantizer\.",
    r"^(proj_in|proj_out|time_embedder|(audio|action)_(proj_in|proj_out|modality_embed))\b",
)
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
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


def col_qwen3(config: HfConfig) -> DecoderSpec:
    """Models of late interaction over Qwen3-VL."""
    return qwen_vl({**config, **(config.get("vlm_config") or {}), "model_type": "qwen3_vl"})


def col_qwen3_5(config: HfConfig) -> DecoderSpec:
    """Models of late interaction over Qwen3.5."""
    return qwen_vl({**config, "model_type": "qwen3_5"})


def qwen2_audio(config: HfConfig) -> DecoderSpec:
    """Qwen2-Audio. Its config leaves out sizes of the text model."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 32)
    config = {**config, "text_config": {"hidden_size": 4096, **sizes, **config["text_config"]}}
    return replace(_text(config, "qwen2"), media=MediaSpec("qwen2_audio", config))


def qwen3_asr(config: HfConfig) -> DecoderSpec:
    """Qwen3-ASR, in Qwen's own format, in which it is a part of the config, and in transformers'."""
    whole = config.get("thinker_config") or config
    text = {**whole["text_config"], "model_type": "qwen3"}
    for name in ("rope_parameters", "rope_scaling"):  # a sound's positions are the same on all axes
        if rope := text.get(name):
            text[name] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    projector = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
    if whole is not config:
        projector = ("audio_tower.proj1", "audio_tower.proj2")
    return replace(
        _text({**whole, "text_config": text}), media=MediaSpec("qwen3_asr", {**whole, "projector": projector})
    )


def idefics3(config: HfConfig) -> DecoderSpec:
    """Idefics3 and SmolVLM."""
    return replace(_text(config), media=MediaSpec("idefics3", config))


def internvl(config: HfConfig) -> DecoderSpec:
    """InternVL 3 in transformers' format, whose names end with -hf."""
    spec = _text(config, "qwen2")
    return replace(spec, media=MediaSpec("internvl", config), ignored=(*spec.ignored, UNUSED))


def internvl_chat(config: HfConfig) -> DecoderSpec:
    """InternVL 1.5 to 3.5 in the original format. Raises ValueError for InternVL 1."""
    if config.get("ps_version", "v1") == "v1":
        raise ValueError("an InternVL with ps_version v1 is not supported")
    vision = {"qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm", **config["vision_config"]}
    vision |= {"fused_qkv": True, "attention_bias": vision["qkv_bias"], "use_qk_norm": vision["qk_normalization"]}
    is_cut = config.get("dynamic_image_size", True)
    of_images = {
        **_IMAGENET,
        "crop_to_patches": is_cut,
        "min_patches": config.get("min_dynamic_patch", 1),
        "max_patches": config.get("max_dynamic_patch", 6),
        "use_thumbnail": bool(config.get("use_thumbnail")),
    }
    own = {
        "text_config": config.get("llm_config") or config["text_config"],
        "vision_config": vision,
        "vision_feature_layer": config.get("select_layer", -1),
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "of_images": of_images,
    }
    media = MediaSpec("internvl", own, names=_OF_INTERN_VIT, mark="<IMG_CONTEXT>")
    spec = _text(own, "qwen2")
    return replace(spec, media=media, ignored=(*spec.ignored, r"^vision_model\."))


def nvlm_d(config: HfConfig) -> DecoderSpec:
    """NVLM-D: an InternVL whose tiles are numbered, with a wider projector without biases."""
    spec = internvl_chat({"ps_version": "v2", **config, "use_thumbnail": True})
    assert spec.media is not None
    text = spec.media.config["text_config"]
    wide = {"projector_hidden_size": text["intermediate_size"], "projector_bias": False, "numbers_tiles": True}
    return replace(spec, media=replace(spec.media, config={**spec.media.config, **wide}, mark="<|vision_pad|>"))


def interns2(config: HfConfig) -> DecoderSpec:
    """Intern-S2: a Qwen3.5 with experts, and an encoder of time series, which is left out."""
    spec = qwen_vl({**config, "model_type": "qwen3_5_moe"})
    return replace(spec, ignored=(*spec.ignored, r"^(model\.)?time_series\."))


def cosmos3(config: HfConfig) -> DecoderSpec:
    """Cosmos 3's reasoner: a Qwen3-VL, in one checkpoint with layers that generate, which are left out."""
    spec = qwen_vl({**config, "model_type": "qwen3_vl"})
    return replace(spec, ignored=(*spec.ignored, *_OF_GENERATION))


def cosmos3_edge(config: HfConfig) -> DecoderSpec:
    """The text model of Cosmos 3 Edge, without the layers that generate."""
    spec = arcee(config)
    return replace(spec, ignored=(*spec.ignored, *_OF_GENERATION))


def alpamayo2(config: HfConfig) -> DecoderSpec:
    """Alpamayo 2 Super: a Qwen3-VL, next to an expert for trajectories, which is left out."""
    spec = qwen_vl({**config["vlm_config"], "model_type": "qwen3_vl"})
    assert spec.media is not None
    count = config.get("history_vocab_size", 1000) + config.get("future_vocab_size", 3000)
    pixels = {"min_pixels": config.get("min_pixels", 163_840), "max_pixels": config.get("max_pixels", 196_608)}
    own = {"trajectories": {"ids": config.get("traj_ids") or {}, "count": count}, "pixels": pixels}
    media = replace(
        spec.media,
        family="alpamayo2",
        config={**spec.media.config, **own},
        names=((r"^visual\.", "vlm.model.visual."),),
    )
    names = {
        role: name and f"vlm.{name}".replace("vlm.model.", "vlm.model.language_model.")
        for role, name in spec.names.items()
    }
    return replace(spec, media=media, names=names, ignored=(*spec.ignored, r"^expert\."))


def opencua(config: HfConfig) -> DecoderSpec:
    """OpenCUA: a Qwen2.5-VL without rotary positions of several axes."""
    marks = {
        "image_token_id": config.get("media_placeholder_token_id", 151_664),
        "video_token_id": None,
        "has_axes": False,
    }
    spec = qwen_vl({**config, **marks, "model_type": "qwen2_5_vl"})
    assert spec.media is not None
    return replace(spec, media=replace(spec.media, names=((r"^visual\.", "vision_tower."),)))


def llava_with_norm(config: HfConfig) -> DecoderSpec:
    """R-4B and Bee: LLaVA-OneVision with a norm in its projector. Bee's projector has a wide layer between."""
    factor = 4 if config.get("architectures") == ["BeeForConditionalGeneration"] else 1
    width = factor * config["text_config"]["hidden_size"]
    own = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    own = {**own, **config, "projector_norm_eps": 1e-6, "projector_hidden_size": width}
    spec = _text(own, "qwen3")
    return replace(spec, media=MediaSpec("llava_next", own), ignored=(*spec.ignored, UNUSED))
