"""Compares the speed of chats about images with transformers, interleaved.

    python -m benchmarks.image_chat [--chats 8] [--rounds 3] [--plot FILE.png]

The model is a LLaVA with random weights: the language model has the shapes of SmolLM2-135M, and the encoder those of
CLIP ViT-B/16, which computes 196 embeddings per image. Each chat has its own image with a question, followed by a
second question; each answer has 32 tokens. Both programs are in this process, use all its threads and bfloat16, and get
the images as PIL images and the same tokens. transformers processes all chats as one batch of prompts with the same
length. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.embeddings import plot
from quire import LLM, SamplingParams

ANSWER, QUESTION, SIDE = 32, 24, 224  # tokens, tokens, pixels
PICTURE = 300  # the placeholder token of an image embedding
EMBEDS = (SIDE // 16) ** 2


def write_model(folder: Path) -> Any:
    """Write the checkpoint. Return the image processor of transformers."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PreTrainedTokenizerFast,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    text = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    vision = CLIPVisionConfig(image_size=SIDE, patch_size=16, projection_dim=512)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=PICTURE)
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters += [f"<{i}>" for i in range(PICTURE - len(letters))]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(folder)
    return processor


Answer = Callable[[list[list[int]], list[Image.Image]], list[list[int]]]  # prompts, images


class Chats:
    """The images and the questions about them."""

    def __init__(self, count: int, round_number: int) -> None:
        dice = random.Random(round_number)
        draw = np.random.default_rng(round_number)
        self.pictures = [Image.fromarray(draw.integers(0, 256, (300, 400, 3), dtype=np.uint8)) for _ in range(count)]
        self.questions = [[[dice.randrange(256) for _ in range(QUESTION)] for _ in range(count)] for _ in range(2)]

    def run(self, answer: Answer) -> float:
        """Seconds."""
        started = time.perf_counter()
        first = [[PICTURE, *question] for question in self.questions[0]]
        answers = answer(first, self.pictures)
        answer([[*a, *b, *c] for a, b, c in zip(first, answers, self.questions[1], strict=True)], self.pictures)
        return time.perf_counter() - started


def with_quire(folder: Path, **options: Any) -> Answer:
    llm = LLM(
        str(folder), dtype="bfloat16", max_model_len=1024, max_num_seqs=64, kv_cache_memory_bytes=1 << 30, **options
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)

    def answer(prompts: list[list[int]], pictures: list[Image.Image]) -> list[list[int]]:
        given = [
            {"prompt_token_ids": prompt, "multi_modal_data": {"image": picture}}
            for prompt, picture in zip(prompts, pictures, strict=True)
        ]
        return [list(output.outputs[0].token_ids) for output in llm.generate(given, params, use_tqdm=False)]

    return answer


def with_transformers(folder: Path, processor: Any) -> Answer:
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def answer(prompts: list[list[int]], pictures: list[Image.Image]) -> list[list[int]]:
        pixels = processor(pictures, return_tensors="pt")["pixel_values"].to(torch.bfloat16)
        ids = torch.tensor([[t for token in p for t in [token] * (EMBEDS if token == PICTURE else 1)] for p in prompts])
        made = model.generate(
            input_ids=ids,
            pixel_values=pixels,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [list(map(int, row)) for row in made[:, ids.shape[1] :]]

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processor = write_model(folder)
        programs = {
            "transformers": with_transformers(folder, processor),
            "Quire": with_quire(folder),
            "Quire without prefix cache": with_quire(folder, enable_prefix_caching=False),
        }
        for answer in programs.values():
            Chats(args.chats, args.rounds).run(answer)  # a warm-up
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for number in range(args.rounds):
            for name, answer in programs.items():
                seconds[name].append(Chats(args.chats, number).run(answer))
    print(f"{args.chats} chats, {args.rounds} rounds, {torch.get_num_threads()} threads\n")
    print("| | answers a second | times transformers |")
    print("|---|---|---|")
    for name, found in seconds.items():
        ratio = median(base / each for base, each in zip(seconds["transformers"], found, strict=True))
        print(f"| {name} | {2 * args.chats / median(found):.2f} | {ratio:.2f} |")
    if args.plot:
        plot(args.plot, 2 * args.chats, seconds, "answers a second")


if __name__ == "__main__":
    main()
