"""References computed by transformers: greedy continuations, and the logits of a given text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.checkpoints import ALL_VARIANTS, FAMILIES, VARIANTS, Checkpoints, build
from support.continuations import key, recorded
from support.families import REFERENCE_CONFIG
from support.layouts import STAND_INS

NUM_TOKENS = 64
TIE = 1e-4  # if the two best logits are closer than this, either token is right, and later tokens may differ
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 100)  # around the borders of blocks of 16
NUM_PROMPTS = 32
FEWER_PROMPTS = 12  # for all but the first variant of a family


def prompts(vocab_size: int, count: int = NUM_PROMPTS) -> list[list[int]]:
    """`count` random prompts. The first ones have the lengths in LENGTHS."""
    draw = random.Random(5)
    lengths = [*LENGTHS, *(draw.randint(1, 70) for _ in range(count - len(LENGTHS)))]
    return [[draw.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


@dataclass
class Continuation:
    """token_ids: the greedy tokens. certain: how many of them come before the first tie."""

    prompt: list[int]
    token_ids: list[int]
    certain: int

    def check(self, token_ids: list[int]) -> None:
        assert len(token_ids) == len(self.token_ids)
        assert token_ids[: self.certain] == self.token_ids[: self.certain], f"prompt of {len(self.prompt)} tokens"


def load(path: Path, **config: Any) -> Any:
    """config: fields that replace those of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = AutoConfig.from_pretrained(path, **config)
    return AutoModelForCausalLM.from_pretrained(
        path,
        config=settings,
        dtype=torch.float32,
        # transformers 5's eager attention of Falcon adds the slopes of ALiBi twice
        attn_implementation="sdpa" if getattr(settings, "alibi", False) else "eager",
        experts_implementation="eager",  # grouped products need widths that are multiples of 4
    ).eval()


@torch.inference_mode()
def greedy(model: Any, texts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[Continuation]:
    """transformers' own generate with its own cache, padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    made = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(made.logits).topk(2, dim=-1).values  # [tokens, texts, 2]
    tie = (best[..., 0] - best[..., 1] < TIE).T.tolist()
    return [
        Continuation(text, tokens, ties.index(True) if any(ties) else num_tokens)
        for text, tokens, ties in zip(texts, made.sequences[:, width:].tolist(), tie, strict=True)
    ]


@torch.inference_mode()
def logits(model: Any, text: list[int]) -> Tensor:
    """[tokens, vocab]"""
    return model(torch.tensor([text])).logits[0]


class References:
    """transformers' models of the variants, and its continuations of their prompts."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._models: dict[str, Any] = {}
        self._continuations: dict[str, list[Continuation]] = {}

    def model(self, variant: str) -> Any:
        if variant not in self._models:
            kind, config, writing = ALL_VARIANTS[variant]
            if kind in STAND_INS:  # transformers cannot read the file
                model = build(kind, config, writing.get("seed", 0))
                model.set_attn_implementation("eager")
                if hasattr(model, "set_experts_implementation"):
                    model.set_experts_implementation("eager")
            else:
                model = load(self._checkpoints.path(variant), **REFERENCE_CONFIG.get(variant, {}))
            self._models[variant] = model
        return self._models[variant]

    def continuations(self, variant: str) -> list[Continuation]:
        """Of the variant's prompts: the recorded ones, or those that transformers computes now."""
        if variant not in self._continuations:
            known = recorded(variant, self.key(variant))
            self._continuations[variant] = (
                self.compute(variant)
                if known is None
                else [Continuation(text, *made) for text, made in zip(self._texts(variant), known, strict=True)]
            )
        return self._continuations[variant]

    @staticmethod
    def key(variant: str) -> str:
        """Of the recorded continuations: it changes with all that they depend on."""
        return key(variant, prompts, greedy, load, References.compute, References._texts)

    @staticmethod
    def _texts(variant: str) -> list[list[int]]:
        kind, config, _ = ALL_VARIANTS[variant]
        count = NUM_PROMPTS if variant in VARIANTS or variant == FAMILIES[kind][0] else FEWER_PROMPTS
        return prompts(config.get("vocab_size", 320), count)

    def forget(self, variant: str) -> None:
        """Free the memory of the variant's model."""
        self._models.pop(variant, None)

    def compute(self, variant: str) -> list[Continuation]:
        """The continuations as transformers computes them."""
        kind, config, _ = ALL_VARIANTS[variant]
        texts = self._texts(variant)
        # transformers' Llama 4 counts padding in the positions by which it makes queries sharper, and its Mamba
        # and LFM2 with a bias before the convolution read padding.
        biases = ("use_bias", "mamba_proj_bias", "conv_bias")
        alone = kind in ("llama4_text", "mistral4") or any(config.get(name) for name in biases)
        batches = [[text] for text in texts] if alone else [texts]
        return [c for batch in batches for c in greedy(self.model(variant), batch)]
