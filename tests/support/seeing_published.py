"""Tiny models in the layouts of published checkpoints that transformers cannot read: another config, and other names of
tensors. They compute what a model of transformers computes, which is compared with; see `support.seeing`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.layouts import text_layers

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
Publish = Callable[[Fields, Tensors], tuple[Fields, Tensors]]


def publish(directory: Path, change: Publish) -> None:
    """Rewrite a checkpoint that transformers has saved."""
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "config.json").read_text())
    config, tensors = change(config, load_file(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    made = {}
    for name, tensor in tensors.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        made[name] = tensor
    return made


OF_TEXT = (
    (r"^(model\.)?language_model\.(model\.)*(?!lm_head)", "language_model.model."),
    (r"^(language_model\.)?lm_head", "language_model.lm_head"),
)


def as_internvl_chat(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """The original format of InternVL, with q, k and v of the encoder in one tensor."""
    vision = config["vision_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
            "layer_norm_eps", "norm_type")  # fmt: skip
    own = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": {
            **{name: vision[name] for name in kept},
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
        },
        "downsample_ratio": config["downsample_ratio"],
        "select_layer": -1,
        "ps_version": "v2",
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
    }
    tensors = renamed(
        tensors,
        (r"^(model\.)?vision_tower\.", "vision_model."),
        (r"^(model\.)?multi_modal_projector\.layer_norm", "mlp1.0"),
        (r"^(model\.)?multi_modal_projector\.linear_1", "mlp1.1"),
        (r"^(model\.)?multi_modal_projector\.linear_2", "mlp1.3"),
        *OF_TEXT,
        (r"cls_token", "class_embedding"),
        (r"position_embeddings", "position_embedding"),
        (r"patch_embeddings\.projection", "patch_embedding"),
        (r"encoder\.layer\.", "encoder.layers."),
        (r"\.layernorm_before", ".norm1"),
        (r"\.layernorm_after", ".norm2"),
        (r"\.lambda_(.)", r".ls\1"),
        (r"attention\.projection_layer", "attn.proj"),
        (r"\.attention\.", ".attn."),
    )
    for name in [name for name in tensors if name.startswith("vision_model.") and ".attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return own, tensors


def as_nvlm(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    config, tensors = as_internvl_chat(config, tensors)
    return {**config, "architectures": ["NVLM_D"], "model_type": "NVLM_D"}, tensors


def named(architecture: str, **fields: Any) -> Publish:
    """Another architecture with the same fields and tensors, besides those that are given."""
    return lambda config, tensors: ({**config, **fields, "architectures": [architecture]}, tensors)


def as_cosmos3(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """Names of Diffusers, without those of the parts, and a tensor of what generates."""
    tensors = renamed(
        tensors,
        (r"^(model\.)?visual\.", ""),
        (r"^model\.language_model\.", ""),
        (r"\.([qkv])_proj\.", r".to_\1."),
        (r"\.o_proj\.", ".to_out."),
        (r"\.([qk])_norm\.", r".norm_\1."),
    )
    tensors |= {"layers.0.self_attn.to_q_moe_gen.weight": torch.zeros(2, 2), "proj_in.weight": torch.zeros(2, 2)}
    return {**config, "architectures": ["Cosmos3ForConditionalGeneration"], "model_type": "cosmos3_omni"}, tensors


def as_alpamayo2(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    own = {
        "architectures": ["Alpamayo2Super"],
        "model_type": "alpamayo2_super",
        "vlm_config": config,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 30,
        "traj_ids": {},
    }
    return own, {**renamed(tensors, ("^", "vlm.")), "expert.norm.weight": torch.zeros(2)}


def as_opencua(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    token_id = config.pop("image_token_id")
    del config["video_token_id"]
    own = {"architectures": ["OpenCUAForConditionalGeneration"], "model_type": "opencua"}
    tensors = renamed(tensors, (r"^(model\.)?visual\.", "vision_tower."), *OF_TEXT)
    text = {**config["text_config"], "model_type": "qwen2"}
    return {**config, **own, "text_config": text, "media_placeholder_token_id": token_id}, tensors


class NormedProjector(nn.Module):
    """That of R-4B and Bee, in place of a LLaVA's."""

    def __init__(self, old: Any, inner: int) -> None:
        super().__init__()
        width = old.linear_1.in_features
        hidden = old.linear_2.out_features
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_1 = nn.Linear(width, inner)
        self.linear_2 = nn.Linear(inner, hidden)
        for layer in (self.linear_1, self.linear_2):
            nn.init.normal_(layer.weight, std=0.3)
        nn.init.normal_(self.pre_norm.weight, 1, 0.3)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.linear_2(nn.functional.gelu(self.linear_1(self.pre_norm(features))))
        return out


# ---- the layouts of architectures that quire.models.transformers_backend.published translates


def kimi_text(tensors: Tensors) -> Tensors:
    return text_layers("blocks")(tensors, {})


def as_kimi_k25(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    vision = config["vision_config"]
    own = {
        "model_type": "kimi_k25",
        "text_config": {**config["text_config"], "model_type": "kimi_k2"},
        "vision_config": {
            **{f"init_{name}": vision[name] for name in ("pos_emb_height", "pos_emb_width", "pos_emb_time")},
            **{f"vt_{name}": vision[name] for name in VISION_SIZES},
            **{name: vision[name] for name in ("patch_size", "merge_kernel_size")},
            "projector_ln_eps": config["projection_layer_norm_eps"],
        },
        "media_placeholder_token_id": config["image_token_id"],
    }
    return own, kimi_text(tensors)


def as_kimi_vl(config: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    vision = config["vision_config"]
    own = {
        "model_type": "kimi_vl",
        "text_config": {**config["text_config"], "model_type": "deepseek_v3"},
        "vision_config": {
            **{f"init_{name}": vision[name] for name in ("pos_emb_height", "pos_emb_width")},
            **{name: vision[name] for name in (*VISION_SIZES, "patch_size", "merge_kernel_size")},
        },
        "media_placeholder_token_id": config["image_token_id"],
    }
    names = (
        (r"^mm_projector\.pre_norm", "multi_modal_projector.pre_norm"),
        (r"^mm_projector\.proj\.0", "multi_modal_projector.linear_1"),
        (r"^mm_projector\.proj\.2", "multi_modal_projector.linear_2"),
    )
    return own, renamed(kimi_text(tensors), *names)


def as_thinker(model_type: str) -> Publish:
    """model_type: of the whole, which also speaks."""
    return lambda config, tensors: (
        {"model_type": model_type, "thinker_config": config},
        renamed(tensors, ("^", "thinker.")),
    )


VISION_SIZES = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size")


AS_PUBLISHED: dict[str, Publish] = {
    "KimiK25ForConditionalGeneration": as_kimi_k25,
    "KimiVLForConditionalGeneration": as_kimi_vl,
    "LightOnOCRForConditionalGeneration": lambda config, tensors: (config, tensors),
    "NemotronH_Nano_Omni_Reasoning_V3": lambda config, tensors: (config, tensors),
    "NemotronH_Super_Omni_Reasoning_V3": lambda config, tensors: (config, tensors),
    "Qwen2_5OmniForConditionalGeneration": as_thinker("qwen2_5_omni"),
    "Qwen2_5OmniModel": as_thinker("qwen2_5_omni"),
    "Qwen3OmniMoeForConditionalGeneration": as_thinker("qwen3_omni_moe"),
}
