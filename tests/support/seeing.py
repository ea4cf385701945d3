"""Tiny models that see, with random weights, and what transformers says about pictures with them."""

from __future__ import annotations

import json
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

NUM_TOKENS = 24
TIE = 1e-4
TEXT = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip
# The first ids behind those of the byte-level tokenizer.
FIRST = 300


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
    a picture in a prompt."""

    make: Callable[[], Any]
    processor: Callable[[Any], Any]
    tokens: tuple[str, ...]
    mark: str

    def prompts(self) -> list[tuple[str, list[Image.Image]]]:
        mark = self.mark
        return [
            (f"Look: {mark} What do you see?", [picture(1)]),
            (f"{mark} and {mark}: which is it?", [picture(2, 30, 50), picture(3, 64, 64)]),
            ("A text without any pictures, which is a little longer than the others are.", []),
            (f"The same again: {mark} then {mark}.", [picture(1), picture(1)]),
            (f"A long text comes first here, and then a picture, wide as it is: {mark}", [picture(4, 100, 28)]),
        ]


def write(directory: Path, model: Model) -> Path:
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(7)
    network = model.make().eval().float()
    network.save_pretrained(directory)
    model.processor(tokenizer(model.tokens)).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


@torch.inference_mode()
def continuations(directory: Path, model: Model) -> list[tuple[list[Image.Image], str, Continuation]]:
    """For each prompt: its pictures, its text, and what transformers says, with the tokens as its processor makes
    them."""
    network = type(model.make()).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    processor = model.processor(tokenizer(model.tokens))
    found = []
    for text, pictures in model.prompts():
        inputs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        made = network.generate(
            **inputs, do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, eos_token_id=None,
            pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        prompt = inputs["input_ids"][0].tolist()
        best = torch.stack(made.logits)[:, 0].topk(2, dim=-1).values
        ties = (best[:, 0] - best[:, 1] < TIE).tolist()
        certain = ties.index(True) if any(ties) else NUM_TOKENS
        found.append((pictures, text, Continuation(prompt, made.sequences[0, len(prompt) :].tolist(), certain)))
    return found


def llava_model() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14,
        projection_dim=32, initializer_range=0.3,
    )  # fmt: skip
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_index=FIRST)
    )


def llava_processor(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    pixels = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaProcessor(
        pixels, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<image>",
    )  # fmt: skip


MODELS: dict[str, Model] = {"llava": Model(llava_model, llava_processor, ("<image>",), "<image>")}


@cache
def _memory() -> dict[str, Any]:
    return {}


def prepared(name: str, folder: Path) -> tuple[Path, list[tuple[list[Image.Image], str, Continuation]]]:
    """The checkpoint of a model, and its continuations, made once a process."""
    if name not in (memory := _memory()):
        path = write(folder / name, MODELS[name])
        memory[name] = path, continuations(path, MODELS[name])
    found: tuple[Path, list[tuple[list[Image.Image], str, Continuation]]] = memory[name]
    return found
