"""Tiny models of Gemma 3 and PaliGemma, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from support.seeing_base import FIRST, TEXT

GEMMA_SPECIAL = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")


def gemma3_model() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        **TEXT,
        "sliding_window": 20,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": 14,
        "vision_use_head": False,
    }
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=16,
            image_token_index=FIRST,
            boi_token_index=FIRST + 1,
            eoi_token_index=FIRST + 2,
        )
    )
    projection = model.model.multi_modal_projector.mm_input_projection_weight  # zeros by default
    torch.nn.init.normal_(projection, std=0.5)
    return model


def gemma3_processor(tokenizer: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = dict(zip(("image_token", "boi_token", "eoi_token"), GEMMA_SPECIAL, strict=True))
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    pixels = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    return Gemma3Processor(pixels, tokenizer, image_seq_length=16)


PALIGEMMA_SIDE = 56  # of pictures, in pixels


def paligemma_model(kind: str = "gemma") -> Any:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    text = {**TEXT, "model_type": kind, "pad_token_id": 0}
    if kind == "gemma2":
        text |= {"sliding_window": 200, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": PALIGEMMA_SIDE,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = PaliGemmaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=FIRST,
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
        vocab_size=TEXT["vocab_size"],
        bos_token_id=1,
    )
    return PaliGemmaForConditionalGeneration(config)


def paligemma2_model() -> Any:
    return paligemma_model("gemma2")


def paligemma_processor(tokenizer: Any) -> Any:
    from transformers import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    pixels = SiglipImageProcessorPil(size={"height": PALIGEMMA_SIDE, "width": PALIGEMMA_SIDE})
    pixels.image_seq_length = 16
    tokenizer.image_token = "<image>"
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    return PaliGemmaProcessor(pixels, tokenizer)
