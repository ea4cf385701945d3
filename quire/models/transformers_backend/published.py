"""Published checkpoints of models that transformers has under another name, and in another layout.

Their config.json is translated here into one of transformers. Names of tensors are changed by transformers itself,
which knows most of the original ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


def _same(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Published:
    """model_type: transformers' type of the model. architecture: transformers' class. config: translates config.json.
    names: patterns of the encoder's tensors' names, and replacements that transformers does not know. pictures: the
    settings of transformers' image processor, if it cannot read those of the checkpoint."""

    model_type: str
    architecture: str
    config: Callable[[Config], Config] = _same
    names: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, Any] | None = None


def _renamed(config: Mapping[str, Any], **names: str) -> Config:
    """Return the fields that a config has of these. names: transformers' name of each, and the checkpoint's."""
    return {name: config[own] for name, own in names.items() if own in config}


def _moon_vit(vision: Mapping[str, Any]) -> Config:
    kept = ("patch_size", "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size",
            "merge_kernel_size", "pos_emb_height", "pos_emb_width", "pos_emb_time")  # fmt: skip
    renamed = _renamed(
        vision,
        pos_emb_height="init_pos_emb_height",
        pos_emb_width="init_pos_emb_width",
        pos_emb_time="init_pos_emb_time",
        num_attention_heads="vt_num_attention_heads",
        num_hidden_layers="vt_num_hidden_layers",
        hidden_size="vt_hidden_size",
        intermediate_size="vt_intermediate_size",
    )
    return {**{name: vision[name] for name in kept if name in vision}, **renamed}


def _kimi(config: Config) -> Config:
    vision = _moon_vit(config["vision_config"])
    return {
        "text_config": {**config["text_config"], "model_type": "deepseek_v3"},
        "vision_config": vision,
        "projection_hidden_size": vision["hidden_size"],
        "projection_layer_norm_eps": config["vision_config"].get("projector_ln_eps", 1e-5),
        "image_token_id": config.get("image_token_id", config.get("media_placeholder_token_id", 163_605)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _thinker(config: Config) -> Config:
    """Of a model that also speaks: the part that writes."""
    return dict(config["thinker_config"])


_OMNI2_5 = Published(
    "qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", _thinker, {r"^thinker\.": ""}
)
_OMNI3 = Published(
    "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", _thinker, {r"^thinker\.": ""}
)
PUBLISHED: dict[str, Published] = {
    "KimiK25ForConditionalGeneration": Published("kimi_k25", "Kimi_K25ForConditionalGeneration", _kimi, pictures={}),
    "KimiVLForConditionalGeneration": Published(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        _kimi,
        {
            r"^multi_modal_projector\.pre_norm": "model.mm_projector.pre_norm",
            r"^multi_modal_projector\.linear_1": "model.mm_projector.in_proj",
            r"^multi_modal_projector\.linear_2": "model.mm_projector.out_proj",
        },
        {"max_patches": 4096},
    ),
    "LightOnOCRForConditionalGeneration": Published("lighton_ocr", "LightOnOcrForConditionalGeneration"),
    "NemotronH_Nano_Omni_Reasoning_V3": Published("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3"),
    "NemotronH_Super_Omni_Reasoning_V3": Published("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3"),
    "Qwen2_5OmniForConditionalGeneration": _OMNI2_5,
    "Qwen2_5OmniModel": _OMNI2_5,
    "Qwen3OmniMoeForConditionalGeneration": _OMNI3,
}


def published_as(config: Config) -> Published | None:
    """Return how a checkpoint is read, None if its layout is one of transformers."""
    return next((PUBLISHED[name] for name in config.get("architectures") or [] if name in PUBLISHED), None)


def translated(config: Config) -> Config:
    """Return a config in the layout of transformers."""
    found = published_as(config)
    if found is None:
        return config
    kept: Config = {name: config[name] for name in ("quantization_config", "dtype", "torch_dtype") if name in config}
    own: Config = {"model_type": found.model_type, "architectures": [found.architecture]}
    return {**kept, **found.config(config), **own}
