"""Tiny models that see, in layouts that transformers cannot read; see `support.seeing_published`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.seeing import (
    INTERN_SPECIAL,
    Model,
    SimulatedGpu,
    internvl_model,
    internvl_processor,
    onevision_model,
    onevision_processor,
)
from support.seeing_base import TEXT
from support.seeing_published import (
    NormedProjector,
    as_alpamayo2,
    as_cosmos3,
    as_internvl_chat,
    as_nvlm,
    as_opencua,
    named,
)
from support.seeing_qwen import (
    QWEN_MARK,
    QWEN_SPECIAL,
    qwen2_5_vl_model,
    qwen3_5_moe_model,
    qwen3_vl_model,
    qwen_processor,
)


def interns1_model() -> Any:
    from transformers import Qwen3Config

    config = internvl_model().config
    config.text_config = Qwen3Config(**TEXT)
    return type(internvl_model())(config)


def nvlm_model() -> Any:
    """An InternVL with a wider projector without biases."""
    from transformers import InternVLForConditionalGeneration

    class Wide(InternVLForConditionalGeneration):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            projector = self.model.multi_modal_projector
            width = projector.linear_1.in_features
            projector.linear_1 = torch.nn.Linear(width, config.text_config.intermediate_size, bias=False)
            projector.linear_2 = torch.nn.Linear(config.text_config.intermediate_size, 64, bias=False)

    return Wide(internvl_model().config)


def nvlm_processor(tokenizer: Any) -> Any:
    return NvlmStandIn(internvl_processor(tokenizer).pixels, tokenizer, 4)


NVLM_SPECIAL = (
    "<|vision_pad|>",
    "<Image>",
    "</Image>",
    "<tile_global_thumbnail>",
    *(f"<tile_{number}>" for number in range(1, 7)),
)


class NvlmStandIn(SimulatedGpu):
    """unit: embeddings of a tile."""

    mark = "<|vision_pad|>"

    def texts(self, inputs: dict[str, Any]) -> list[str]:
        made = []
        for count in inputs.pop("num_patches").tolist():
            names = [f"<tile_{number}>" for number in range(1, count)] + ["<tile_global_thumbnail>"]
            made.append("<Image>" + "".join(name + self.mark * self.unit for name in names) + "</Image>")
        return made


def with_norm(factor: int) -> Callable[[], Any]:
    """A LLaVA-OneVision with the projector of R-4B or Bee."""

    def make() -> Any:
        from transformers import LlavaOnevisionForConditionalGeneration

        class Normed(LlavaOnevisionForConditionalGeneration):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                old = self.model.multi_modal_projector
                self.model.multi_modal_projector = NormedProjector(old, factor * old.linear_2.out_features)

        return Normed(onevision_model().config)

    return make


def opencua_model() -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    class Plain(Qwen2_5_VLForConditionalGeneration):
        """All axes of a token have its own position."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.get_rope_index = self.positions

        def positions(self, input_ids: Any, *others: Any, **more: Any) -> tuple[Any, Any]:
            return torch.arange(input_ids.shape[1]).expand(3, 1, -1), torch.zeros(1, 1, dtype=torch.long)

    return Plain(qwen2_5_vl_model().config)


ONEVISION_TOKENS = ("<image>", "<video>")
PUBLISHED: dict[str, Model] = {  # in layouts that transformers cannot read
    "internvl_chat": Model(internvl_model, internvl_processor, INTERN_SPECIAL, "<IMG_CONTEXT>", as_internvl_chat),
    "nvlm": Model(nvlm_model, nvlm_processor, NVLM_SPECIAL, "<|vision_pad|>", as_nvlm),
    "interns1": Model(
        interns1_model,
        internvl_processor,
        INTERN_SPECIAL,
        "<IMG_CONTEXT>",
        named("InternS1ForConditionalGeneration", model_type="interns1"),
    ),
    "alpamayo2": Model(qwen3_vl_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK, as_alpamayo2),
    "cosmos3": Model(qwen3_vl_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK, as_cosmos3),
    "interns2": Model(
        qwen3_5_moe_model,
        qwen_processor(16, 0.5),
        QWEN_SPECIAL,
        QWEN_MARK,
        named("InternS2PreviewForConditionalGeneration", model_type="interns2_preview"),
    ),
    "opencua": Model(opencua_model, qwen_processor(14), QWEN_SPECIAL, "<|image_pad|>", as_opencua),
    "r": Model(
        with_norm(1),
        onevision_processor,
        ONEVISION_TOKENS,
        "<image>",
        named("RForConditionalGeneration", model_type="R"),
    ),
    "bee": Model(
        with_norm(4),
        onevision_processor,
        ONEVISION_TOKENS,
        "<image>",
        named("BeeForConditionalGeneration", model_type="bee"),
    ),
}
