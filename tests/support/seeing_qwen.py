"""Tiny models of Qwen's families that see, see `support.seeing`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support.checkpoints import EOS
from support.seeing_base import FIRST, TEXT


def qwen2_vl_model() -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "depth": 3,
        "embed_dim": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "hidden_size": 64,
        "patch_size": 14,
        "initializer_range": 0.3,
    }
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=qwen_text(), vision_config=vision, **QWEN_TOKENS))


def qwen2_5_vl_model() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    }
    config = Qwen2_5_VLConfig(text_config=qwen_text(), vision_config=vision, **QWEN_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 36,
    "initializer_range": 0.3,
}


def qwen3_vl_model() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {**QWEN3_VISION, "deepstack_visual_indexes": [0, 2]}
    text = qwen_text(mrope_interleaved=True)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS))


def qwen3_vl_moe_model() -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {**QWEN3_VISION, "deepstack_visual_indexes": [0, 2]}
    text = {**qwen_text(mrope_interleaved=True), **QWEN_EXPERTS, "tie_word_embeddings": False, "mlp_only_layers": [1]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision, **QWEN_TOKENS))


def qwen3_5_model() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(text_config=QWEN_HYBRID, vision_config=QWEN3_VISION, **QWEN_TOKENS)
    return with_long_memory(Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe_model() -> Any:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {**QWEN_HYBRID, **QWEN_EXPERTS, "shared_expert_intermediate_size": 32}
    del text["intermediate_size"]
    config = Qwen3_5MoeConfig(text_config=text, vision_config=QWEN3_VISION, **QWEN_TOKENS)
    return with_long_memory(Qwen3_5MoeForConditionalGeneration(config))


def with_long_memory(network: Any) -> Any:
    """Let recurrent layers remember pictures: by default, they forget most within a few tokens."""
    for name, parameter in network.named_parameters():
        if name.endswith("A_log"):
            parameter.data = 1.5 * torch.randn(parameter.shape) - 3
    return network


def qwen_text(**rope: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3], **rope}
    return {**TEXT, "rope_parameters": rope}


QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN_HYBRID = {
    **qwen_text(mrope_interleaved=True, partial_rotary_factor=0.5),
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


QWEN_TOKENS = {
    "image_token_id": FIRST,
    "video_token_id": FIRST + 1,
    "vision_start_token_id": FIRST + 2,
    "vision_end_token_id": FIRST + 3,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def qwen_processor(patch: int, mean: float | None = None) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        """A processor without that of videos, which needs torchvision."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        means = {} if mean is None else {"image_mean": [mean] * 3, "image_std": [mean] * 3}
        pixels = Qwen2VLImageProcessorPil(
            patch_size=patch, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 30}, **means
        )
        return QwenProcessor(pixels, tokenizer)

    return make


class QwenProcessor:
    """What transformers' processor does with pictures; the class itself cannot be made without torchvision."""

    def __init__(self, pixels: Any, tokenizer: Any) -> None:
        self.pixels, self.tokenizer = pixels, tokenizer

    def save_pretrained(self, directory: Path) -> None:
        self.pixels.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def __call__(self, text: list[str], images: Any, return_tensors: str) -> dict[str, Any]:
        [prompt] = text
        inputs: dict[str, Any] = {}
        if images:
            inputs = dict(self.pixels(images=images[0], return_tensors="pt"))
            pieces = prompt.split("<|image_pad|>")
            counts = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
            prompt = "".join(p + "<|image_pad|>" * c for p, c in zip(pieces, [*counts, 0], strict=True))
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return {
            **inputs,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == FIRST).int(),
        }
