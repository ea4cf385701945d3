"""Tiny models that see, with random weights, and what transformers says about pictures with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support.checkpoints import EOS, byte_level_tokenizer
from support.reference import Continuation
from support.seeing_base import FIRST, TEXT
from support.seeing_gemma import (
    GEMMA_SPECIAL,
    gemma3_model,
    gemma3_processor,
    paligemma2_model,
    paligemma_model,
    paligemma_processor,
)
from support.seeing_published import Publish, publish
from support.seeing_qwen import (
    QWEN_MARK,
    QWEN_SPECIAL,
    qwen2_5_vl_model,
    qwen2_vl_model,
    qwen3_5_model,
    qwen3_5_moe_model,
    qwen3_vl_model,
    qwen3_vl_moe_model,
    qwen_processor,
)

NUM_TOKENS = 24
TIE = 1e-4


def tokenizer(tokens: tuple[str, ...]) -> Any:
    """tokens: special ones, which get the ids from FIRST on."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer.from_str(byte_level_tokenizer().to_str())
    assert made.get_vocab_size() == FIRST
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<unk>")


def picture(number: int, width: int = 60, height: int = 45) -> Image.Image:
    """A smooth picture with some noise, different for each number."""
    draw = np.random.default_rng(number)
    small = Image.fromarray(draw.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((width, height), 3)
    noise = draw.integers(-20, 20, (height, width, 3))
    return Image.fromarray((np.asarray(small).astype(int) + noise).clip(0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Model:
    """make: the model of transformers. processor: of pictures and text. tokens: the special ones. mark: what stands for
    a picture in a prompt. change: what makes the checkpoint one that transformers cannot read. needs_one: whether each
    prompt has one picture."""

    make: Callable[[], Any]
    processor: Callable[[Any], Any]
    tokens: tuple[str, ...]
    mark: str
    change: Publish | None = None
    needs_one: bool = False

    def prompts(self) -> list[tuple[str, list[Image.Image]]]:
        mark = self.mark
        found = [
            (f"Look: {mark} What do you see?", [picture(1)]),
            (f"{mark} and {mark}: which is it?", [picture(2, 30, 50), picture(3, 64, 64)]),
            ("A text without any pictures, which is a little longer than the others are.", []),
            (f"The same again: {mark} then {mark}.", [picture(1), picture(1)]),
            (f"A long text comes first here, and then a picture, wide as it is: {mark}", [picture(4, 100, 28)]),
        ]
        return [(text, pictures) for text, pictures in found if len(pictures) == 1 or not self.needs_one]


def write(directory: Path, model: Model) -> Path:
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    network = model.make().eval().float()
    network.save_pretrained(directory)
    model.processor(tokenizer(model.tokens)).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    if model.change is not None:
        shutil.copytree(directory, _as_saved(directory, model))
        publish(directory, model.change)
    return directory


def _as_saved(directory: Path, model: Model) -> Path:
    """The checkpoint as transformers has saved it."""
    return directory if model.change is None else directory.with_name(f"{directory.name}-saved")


@torch.inference_mode()
def continuations(
    directory: Path, model: Model, prompts: list[tuple[str, list[Image.Image]]] | None = None
) -> list[tuple[list[Image.Image], str, Continuation]]:
    """For each prompt, by default those of the model: its pictures, its text, and what transformers says, with the
    tokens as its processor makes them."""
    kind = type(model.make())
    saved = _as_saved(directory, model)
    network = kind.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    processor = model.processor(tokenizer(model.tokens))
    found = []
    for text, pictures in prompts or model.prompts():
        inputs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        made = network.generate(
            **inputs,
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        prompt = inputs["input_ids"][0].tolist()
        best = torch.stack(made.logits)[:, 0].topk(2, dim=-1).values
        ties = (best[:, 0] - best[:, 1] < TIE).tolist()
        certain = ties.index(True) if any(ties) else NUM_TOKENS
        found.append((pictures, text, Continuation(prompt, made.sequences[0, len(prompt) :].tolist(), certain)))
    return found


def llava_model() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
        initializer_range=0.3,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=FIRST)
    )


def llava_processor(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pixels = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


SIZES = [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168], [168, 168]]


def llava_next_model() -> Any:
    from transformers import CLIPVisionConfig, LlavaNextConfig, LlavaNextForConditionalGeneration, MistralConfig

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
        initializer_range=0.3,
    )
    text = MistralConfig(**TEXT, sliding_window=None)
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(vision_config=vision, text_config=text, image_token_index=FIRST, image_grid_pinpoints=SIZES)
    )


def llava_next_processor(tokenizer: Any) -> Any:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    pixels = LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=SIZES
    )
    return LlavaNextProcessor(
        pixels,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )


def onevision_model() -> Any:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        vision_use_head=False,
    )
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            vision_config=vision,
            text_config=Qwen2Config(**TEXT),
            image_token_index=FIRST,
            video_token_index=FIRST + 1,
            image_grid_pinpoints=SIZES,
            vision_aspect_ratio="anyres_max_3",
            vision_feature_layer=-1,
            tie_word_embeddings=False,
        )
    )


def onevision_processor(tokenizer: Any) -> Any:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    pixels = LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56}, image_grid_pinpoints=SIZES)
    return OnevisionStandIn(pixels, tokenizer, 16)


IDEFICS_SPECIAL = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)


def idefics3_model() -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    text = {**TEXT, "model_type": "llama"}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=text,
            vision_config=vision,
            image_token_id=FIRST,
            scale_factor=2,
            tie_word_embeddings=False,
            pad_token_id=0,
        )
    )


def idefics3_processor(tokenizer: Any) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    pixels = Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    return Idefics3Processor(pixels, tokenizer, image_seq_len=4)


PIXTRAL_SPECIAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "initializer_range": 0.3,
}


def pixtral_model() -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**TEXT, sliding_window=None)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=PixtralVisionConfig(**PIXTRAL_VISION),
            text_config=text,
            image_token_index=FIRST,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )


def mistral3_model() -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**TEXT, sliding_window=None)
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            vision_config=PixtralVisionConfig(**PIXTRAL_VISION),
            text_config=text,
            image_token_index=FIRST,
            spatial_merge_size=2,
        )
    )


def pixtral_processor(merge: int, longest: int) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        unit = 14 * merge
        pixels = PixtralImageProcessorPil(size={"longest_edge": longest}, patch_size={"height": unit, "width": unit})
        return PixtralStandIn(pixels, tokenizer, unit)

    return make


class SimulatedGpu:
    """What a processor of transformers does with pictures, where the class itself cannot be made without torchvision.
    mark: what stands for a picture in a prompt. unit: what `texts` counts in."""

    mark: str

    def __init__(self, pixels: Any, tokenizer: Any, unit: int) -> None:
        self.pixels, self.tokenizer, self.unit = pixels, tokenizer, unit

    def save_pretrained(self, directory: Path) -> None:
        self.pixels.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def texts(self, inputs: dict[str, Any]) -> list[str]:
        """The text of each picture. inputs: the results of `pixels`, which lose what the model does not take."""
        raise NotImplementedError

    def __call__(self, text: list[str], images: Any, return_tensors: str) -> dict[str, Any]:
        [prompt] = text
        inputs: dict[str, Any] = {}
        if images:
            inputs = dict(self.pixels(images=images[0], return_tensors="pt"))
            pieces = prompt.split(self.mark)
            prompt = "".join(piece + made for piece, made in zip(pieces, [*self.texts(inputs), ""], strict=True))
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


class PixtralStandIn(SimulatedGpu):
    """unit: pixels of an edge of an embedding."""

    mark = "[IMG]"

    def texts(self, inputs: dict[str, Any]) -> list[str]:
        rows = [
            ("[IMG]" * (width // self.unit) + "[IMG_BREAK]", height // self.unit)
            for height, width in inputs["image_sizes"].tolist()
        ]
        return [(row * count).removesuffix("[IMG_BREAK]") + "[IMG_END]" for row, count in rows]


class OnevisionStandIn(SimulatedGpu):
    """unit: embeddings of a tile. transformers' own method counts the others."""

    mark = "<image>"

    def texts(self, inputs: dict[str, Any]) -> list[str]:
        from transformers import LlavaOnevisionProcessor

        bare = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
        bare.image_processor, bare.num_image_tokens, bare.vision_aspect_ratio = self.pixels, self.unit, "anyres_max_3"
        sizes = inputs["image_sizes"].tolist()
        return [self.mark * bare._get_number_of_features(*size, 56, 56) for size in sizes]


INTERN_SPECIAL = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")


def internvl_model() -> Any:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig

    vision = InternVLVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=[56, 56],
        patch_size=[14, 14],
        layer_scale_init_value=0.7,
        initializer_range=0.3,
        attention_bias=True,
        use_qk_norm=True,
    )
    text = {**TEXT, "model_type": "qwen2"}
    return InternVLForConditionalGeneration(
        InternVLConfig(
            vision_config=vision, text_config=text, image_token_id=FIRST, image_seq_length=4, tie_word_embeddings=False
        )
    )


def internvl_processor(tokenizer: Any) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    pixels = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6)
    return InternStandIn(pixels, tokenizer, 4)


class InternStandIn(SimulatedGpu):
    """unit: embeddings of a tile."""

    mark = "<IMG_CONTEXT>"

    def texts(self, inputs: dict[str, Any]) -> list[str]:
        return [f"<img>{self.mark * (int(count) * self.unit)}</img>" for count in inputs.pop("num_patches")]


MODELS: dict[str, Model] = {
    "llava": Model(llava_model, llava_processor, ("<image>",), "<image>"),
    "llava_next": Model(llava_next_model, llava_next_processor, ("<image>",), "<image>"),
    "llava_onevision": Model(onevision_model, onevision_processor, ("<image>", "<video>"), "<image>"),
    "pixtral": Model(pixtral_model, pixtral_processor(1, 56), PIXTRAL_SPECIAL, "[IMG]"),
    "mistral3": Model(mistral3_model, pixtral_processor(2, 112), PIXTRAL_SPECIAL, "[IMG]"),
    "internvl": Model(internvl_model, internvl_processor, INTERN_SPECIAL, "<IMG_CONTEXT>"),
    "idefics3": Model(idefics3_model, idefics3_processor, IDEFICS_SPECIAL, "<image>"),
    "gemma3": Model(gemma3_model, gemma3_processor, GEMMA_SPECIAL, "<start_of_image>"),
    "paligemma": Model(paligemma_model, paligemma_processor, ("<image>",), "<image>", needs_one=True),
    "paligemma2": Model(paligemma2_model, paligemma_processor, ("<image>",), "<image>", needs_one=True),
    "qwen2_vl": Model(qwen2_vl_model, qwen_processor(14), QWEN_SPECIAL, QWEN_MARK),
    "qwen2_5_vl": Model(qwen2_5_vl_model, qwen_processor(14), QWEN_SPECIAL, QWEN_MARK),
    "qwen3_vl": Model(qwen3_vl_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK),
    "qwen3_vl_moe": Model(qwen3_vl_moe_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK),
    "qwen3_5": Model(qwen3_5_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK),
    "qwen3_5_moe": Model(qwen3_5_moe_model, qwen_processor(16, 0.5), QWEN_SPECIAL, QWEN_MARK),
}


SEEING = {
    "Gemma3ForConditionalGeneration", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "InternVLForConditionalGeneration", "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Alpamayo2Super", "Cosmos3ForConditionalGeneration", "Cosmos3OmniForConditionalGeneration",
    "BeeForConditionalGeneration", "InternS1ForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "InternVLChatModel", "NVLM_D", "OpenCUAForConditionalGeneration", "RForConditionalGeneration",
    "SkyworkR1VChatModel",
    "Mistral3ForConditionalGeneration", "PaliGemmaForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "WhisperForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "Qwen3ASRForConditionalGeneration", "BartForConditionalGeneration",
    "MBartForConditionalGeneration", "T5ForConditionalGeneration", "MT5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
}  # fmt: skip


@cache
def _memory() -> dict[str, Any]:
    return {}


def prepared(
    name: str, folder: Path, model: Model | None = None
) -> tuple[Path, list[tuple[list[Image.Image], str, Continuation]]]:
    """The checkpoint of a model, by default that of this name, and its continuations, made once a process."""
    if name not in (memory := _memory()):
        model = model or MODELS[name]
        path = write(folder / name, model)
        memory[name] = path, continuations(path, model)
    found: tuple[Path, list[tuple[list[Image.Image], str, Continuation]]] = memory[name]
    return found
