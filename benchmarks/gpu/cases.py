"""The cases of the check: engines with different cards, models and options. Every pair of options occurs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

from benchmarks.gpu.shapes import SERVED, Served
from quire.config.kernels import KernelConfig

OPTIONS: dict[str, tuple[str, ...]] = {  # the default of each is first
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_cache_dtype": ("auto", "fp8", "int8"),
    "quantization": ("none", "fp8", "int8", "int4", "gptq"),
    "enforce_eager": ("False", "True"),
}
if "batch_invariant" in {field.name for field in fields(KernelConfig)}:
    OPTIONS["batch_invariant"] = ("False", "True")


@dataclass(frozen=True)
class Case:
    """An engine. options: those that differ from the defaults."""

    card: str
    model: Served
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        changed = " ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.card} {self.model.shape}/{self.model.ranks} {changed}".strip()

    @classmethod
    def parse(cls, name: str) -> Case:
        card, model, *options = name.split()
        shape, ranks = model.split("/")
        pairs = (option.split("=") for option in options)
        return cls(card, Served(shape, int(ranks)), tuple((a, b) for a, b in pairs))

    def option(self, name: str) -> str:
        return dict(self.options).get(name, OPTIONS[name][0] if name in OPTIONS else "")


def all_cases(cards: Sequence[str]) -> list[Case]:
    """Return the cases, most valuable first. Every model on every card with default options comes first. Next are
    float8 weights, encoders, adapters, compressed caches, recurrent layers, an encoder-decoder, a vision model, context
    parallelism, sparse attention and 4-bit tables on every card. Pairs of options follow.

    On each card, every pair of values of two options occurs. Every value of every option occurs with every model on
    some card.
    """
    plain = [Case(card, model) for model in SERVED for card in cards]
    others = [
        (Served("llama-3-8b"), (("quantization", "fp8"),)),
        (Served("bge-m3"), (("dtype", "float32"),)),
        (Served("modernbert"), ()),
        (Served("embedding-gemma"), ()),
        (Served("qwen3-0.6b"), (("enable_lora", "True"),)),
        (Served("qwen3-0.6b"), (("kv_compression", "kv_compress"),)),
        (Served("granite-4-h-tiny"), ()),
        (Served("qwen3-next-80b", 4), ()),
        (Served("kimi-linear-48b", 2), ()),
        (Served("jamba-1.5-mini", 2), ()),
        (Served("rwkv7-1.5b"), ()),
        (Served("flan-t5-xl"), ()),
        (Served("qwen2.5-vl-7b"), ()),
        (Served("deepseek-v3", 8), (("decode_context_parallel_size", "8"),)),
        (Served("deepseek-v3.2", 8), ()),
        (Served("deepseek-v3.2", 8), (("kv_cache_dtype", "fp8"),)),
        (Served("gpt-oss-120b"), (("prefill_context_parallel_size", "3"),)),
        (Served("gpt-oss-120b"), (("quantization", "mxfp4"),)),
        (Served("llama-3-8b"), (("quantization", "nvfp4"),)),
        (Served("llama-3-8b"), (("quantization", "nf4"),)),
    ]
    return [*plain, *(Case(card, *other) for other in others for card in cards), *_pairs(cards, plain)]


def _goals(cards: Sequence[str]) -> set[Any]:
    values = [(name, value) for name, values in OPTIONS.items() for value in values]
    both = [(a, b) for a, b in combinations(values, 2) if a[0] != b[0]]
    return {(card, a, b) for card in cards for a, b in both} | {(model, a) for model in SERVED for a in values}


def _met(card: str, model: Served, row: dict[str, str]) -> set[Any]:
    values = list(row.items())
    return {(card, a, b) for a, b in combinations(values, 2)} | {(model, a) for a in values}


def _pairs(cards: Sequence[str], done: Sequence[Case]) -> list[Case]:
    """Return further cases, chosen greedily: next is the random candidate that covers the most uncovered goals."""
    draw = random.Random(0)
    goals = _goals(cards)
    defaults = {name: values[0] for name, values in OPTIONS.items()}
    for case in done:
        goals -= _met(case.card, case.model, defaults)
    cases = []
    while goals:
        best: tuple[int, Any] = (-1, None)
        wanted = sorted(goals, key=str)
        for _ in range(40):
            goal = draw.choice(wanted)
            row = {name: draw.choice(values) for name, values in OPTIONS.items()}
            card = draw.choice(cards)
            model = draw.choice(SERVED)
            if len(goal) == 3:
                card = goal[0]
                row |= dict(goal[1:])
            else:
                model = goal[0]
                row |= dict(goal[1:])
            if (met := len(goals & _met(card, model, row))) > best[0]:
                best = (met, (card, model, row))
        card, model, row = best[1]
        goals -= _met(card, model, row)
        cases.append(Case(card, model, tuple((n, v) for n, v in row.items() if v != defaults[n])))
    return cases
