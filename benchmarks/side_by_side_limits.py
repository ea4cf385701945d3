"""The limits used by side_by_side.py: the sizes of a model, and the minimum time of a workload on a machine."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import REUSES, SEED, WORKLOADS, Requests, common, groups

BLOCK = 16  # tokens in a KV block of Quire


class Model:
    """Sizes, from config.json and the headers of the safetensors files. Raises ValueError if there are none."""

    def __init__(self, directory: Path) -> None:
        self.config = c = json.loads((directory / "config.json").read_text())
        self.shapes: dict[str, list[int]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                header = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
            self.shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        if not self.shapes:
            raise ValueError(f"{directory} holds no .safetensors files")
        self.layers = c["num_hidden_layers"]
        self.head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        experts = c.get("num_local_experts") or c.get("num_experts")  # transformers 5 writes the first name
        self.experts_used = c["num_experts_per_tok"] / experts if experts else 1.0

    def weight_bytes(self, dtype: str, resident: bool = False, tokens: int = 1) -> int:
        """Return the bytes of the weights that a step of `tokens` tokens reads. resident: return the bytes of all
        weights, including an untied embedding.

        int8: a float32 scale per output channel; int4: a bf16 scale per group of 128, the head in int8. The number of
        experts that the tokens choose follows from equally likely experts: n tokens skip an expert with probability (1
        - used / experts)^n.
        """
        total = 0.0
        chosen = 1.0 if resident else 1 - (1 - self.experts_used) ** tokens
        head, table = ("embed_tokens", "lm_head") if self.config.get("tie_word_embeddings") else ("lm_head", "embed_")
        for name, shape in self.shapes.items():
            size = prod(shape)
            if table in name:
                size_bytes = 2 * size * (resident and table == "embed_")  # else it is the head, stored twice
            elif dtype == "bf16" or len(shape) < 2:
                size_bytes = 2 * size
            elif dtype == "int8" or head in name:
                size_bytes = size + 4 * (size // shape[-1])
            else:
                size_bytes = size // 2 + size // 64
            total += size_bytes * (chosen if ".experts." in name else 1)
        return round(total)

    @property
    def product_parameters(self) -> int:
        """Return the number of parameters that multiply a token, including its experts' but not the embedding and the
        head."""
        vocabulary = ("embed_tokens", "lm_head")
        matrices = {name: prod(shape) for name, shape in self.shapes.items() if len(shape) > 1}
        return round(
            sum(
                size * (self.experts_used if ".experts." in name else 1)
                for name, size in matrices.items()
                if not any(part in name for part in vocabulary)
            )
        )

    @property
    def head_parameters(self) -> int:
        return self.config["vocab_size"] * self.config["hidden_size"]

    @property
    def kv_size(self) -> int:
        """Return the bytes of a token's keys and values in one layer."""
        return 2 * self.config["num_key_value_heads"] * self.head_dim


class Machine(NamedTuple):
    """Bytes read per second, and operations per second of products with weights and of attention in bfloat16."""

    read: float
    products: float
    attention: float


@dataclass
class Work:
    """The minimum seconds of the work, and the part of them in which arithmetic takes longer than reading."""

    seconds: float = 0.0
    arithmetic_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.seconds + other.seconds, self.arithmetic_s + other.arithmetic_s)

    @classmethod
    def of(cls, arithmetic: float, reading: float) -> Work:
        """Return the work of concurrent arithmetic and reading, in seconds."""
        return cls(max(arithmetic, reading), arithmetic if arithmetic > reading else 0.0)


class Limit(NamedTuple):
    """The minimum work of a workload."""

    prefill: Work
    decode: Work

    @property
    def total(self) -> Work:
        return self.prefill + self.decode


def count(model: Model, dtype: str, workload: str, machine: Machine) -> Limit:
    """Return the limit of engines that compute the prompts first, and then decode all streams together.

    Prompts: the products and the attention of the tokens after the longest prefix shared with an earlier prompt. The
    last layer computes only keys and values, except for the last token. A decoding step: the products and the attention
    of all streams, or reading the weights once and the keys and values of all streams, whichever takes longer. An
    engine that computes prompts while it reads for other streams could be faster.
    """
    prefill = Work()
    decode = Work()
    seen = list[list[int]]()
    for requests in groups(workload, WORKLOADS[workload](SEED)):
        lengths = []
        for prompt, _ in requests:
            cached = max((common(prompt, before) for before in seen), default=0) if workload in REUSES else 0
            lengths.append((min(cached, len(prompt) - 1), len(prompt)))
            seen.append(prompt)
        prefill += _prompts(model, dtype, lengths, machine)
        for contexts in _steps(requests):
            decode += _step(model, dtype, contexts, machine)
    return Limit(prefill, decode)


def _steps(requests: Requests) -> Iterable[list[int]]:
    """Return the context lengths of the running streams in each decoding step."""
    for step in range(1, max(n for _, n in requests)):
        yield [len(prompt) + step for prompt, n in requests if n > step]


def _prompts(model: Model, dtype: str, lengths: list[tuple[int, int]], machine: Machine) -> Work:
    """Return the work of prompts, each given as (cached tokens, tokens)."""
    operations = pairs = tokens = 0
    per_layer = model.product_parameters / model.layers
    of_kv = model.config["hidden_size"] * model.kv_size
    for cached, length in lengths:
        new = length - cached
        tokens += new
        operations += 2 * (new * (model.layers - 1) * per_layer + (new - 1) * of_kv + per_layer + model.head_parameters)
        pairs += (model.layers - 1) * (length * (length + 1) - cached * (cached + 1)) // 2 + length
    arithmetic = operations / machine.products + _attention(model, pairs) / machine.attention
    reading = model.weight_bytes(dtype, tokens=tokens) / machine.read
    return Work.of(arithmetic, reading)


def _step(model: Model, dtype: str, contexts: list[int], machine: Machine) -> Work:
    """Return the work of a step that decodes one token for each context."""
    held = model.layers * sum(contexts)
    operations = 2 * len(contexts) * (model.product_parameters + model.head_parameters)
    arithmetic = operations / machine.products + _attention(model, held) / machine.attention
    reading = (model.weight_bytes(dtype, tokens=len(contexts)) + 2 * held * model.kv_size) / machine.read
    return Work.of(arithmetic, reading)


def _attention(model: Model, pairs: int) -> int:
    """Return the operations of scores and of weighted values, for `pairs` query-key pairs in all heads."""
    return 4 * pairs * model.config["num_attention_heads"] * model.head_dim
