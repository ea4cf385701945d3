"""The cost of a step on the device: attention, recorded steps and quantized weights. Times depend on the machine;
compare only the lines of a plot with each other.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.mechanisms.engine import Arrival, engine, run, tokens
from benchmarks.mechanisms.plot import BLUE, GREEN, GREY, ORANGE, axes, label_bars
from quire import SamplingParams
from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention

LENGTHS = (128, 512, 2048, 8192)


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread"


def _best_ms(work: Callable[[], object], rounds: int = 40) -> float:
    """Return the rounds that are used; other programs disturbed the others."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def _decode(backend: AttentionBackend, length: int) -> Callable[[], object]:
    """Return a step in which one query of each of four requests attends to `length` keys in scattered blocks."""
    shape = backend.shape
    requests = 4
    blocks = -(-length // shape.block_size)
    table = torch.randperm(requests * blocks).int().view(requests, blocks)
    memory = torch.empty(requests * blocks, backend.entry_bytes(), dtype=torch.uint8)
    cache = backend.view(memory, 0)

    def layout(new: int) -> StepLayout:
        positions = torch.arange(length - new, length)
        slots = table[:, positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
        return StepLayout(
            query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * new,
            seq_lens=torch.full((requests,), length, dtype=torch.int32),
            slot_mapping=slots.flatten(),
            block_table=table,
        )

    def heads(number: int, new: int) -> Tensor:
        return torch.randn(requests * new, number, shape.head_dim)

    k = heads(shape.num_kv_heads, length)
    backend.store(cache, k, torch.randn_like(k), backend.plan(layout(length)))
    q = heads(shape.num_heads, 1)
    plan = backend.plan(layout(1))
    return lambda: backend.attend(q, cache, plan, scale=0.1)


def measure_attention_kernels() -> Any:
    """Measure one layer with 16 query heads and 8 KV heads of 128 values in float32."""
    shape = AttentionShape(16, 8, 128, 16, torch.float32, torch.device("cpu"))
    found: dict[str, Any] = {"machine": machine(), "lengths": list(LENGTHS)}
    for kind in (ReferenceAttention, CpuAttention):
        found[kind.name] = [_best_ms(_decode(kind(shape), length)) for length in LENGTHS]
    return found


def draw_attention_kernels(data: Any, figure: Figure) -> None:
    left = axes(figure, "keys of each of four requests", "ms for one layer", place=(1, 2, 1))
    right = axes(figure, "keys of each of four requests", "GB of keys and values a second", place=(1, 2, 2))
    for name, label, color in (("reference", "reference (torch)", GREY), ("cpu", "C++ kernel", BLUE)):
        rates = [4 * 2 * 8 * 128 * 4 * n / (1e6 * ms) for n, ms in zip(data["lengths"], data[name], strict=True)]
        left.plot(data["lengths"], data[name], "o-", color=color, label=label)
        right.plot(data["lengths"], rates, "o-", color=color)
    for part in (left, right):
        part.set_xscale("log", base=2)
        part.set_xticks(data["lengths"], [f"{length:,}" for length in data["lengths"]])
    left.set_yscale("log")
    right.set_ylim(0)
    left.legend()


def measure_cuda_graphs() -> Any:
    """Measure a decoding step of the bundled model, by the number of requests: the 5th percentile of the step times."""
    found: dict[str, Any] = {"machine": machine(), "requests": [1, 2, 4, 8, 16], "eager": [], "recorded": []}
    for name, eager in (("eager", True), ("recorded", False)):
        llm = engine(max_num_seqs=16, enforce_eager=eager, enable_prefix_caching=False)
        for count in found["requests"]:
            times = list[float]()
            last = [0.0]

            def note(*_: Any, times: list[float] = times, last: list[float] = last) -> None:
                now = time.perf_counter()
                times.append(1e3 * (now - last[0]))
                last[0] = now

            run(llm, [Arrival(0, f"{name} {count} {i}", tokens(16, i), 150) for i in range(count)], note)
            found[name].append(sorted(times[20:])[len(times[20:]) // 20])
    return found


def draw_cuda_graphs(data: Any, figure: Figure) -> None:
    part = axes(figure, "requests in the step", "ms for a step")
    places = range(len(data["requests"]))
    for shift, name, label, color in (
        (-0.2, "eager", "--enforce-eager: each operation is launched", GREY),
        (0.2, "recorded", "replayed from a recording", GREEN),
    ):
        part.bar([x + shift for x in places], data[name], 0.4, color=color, label=label)
    label_bars(part, form="{:.2f}")
    part.set_xticks(places, [str(count) for count in data["requests"]])
    part.set_ylim(0, 1.3 * max(data["eager"]))
    part.legend(loc="upper left")


def weight_bytes(model: object) -> int:
    """Return the bytes of a model's weights and their scales, without KV cache and rotary tables."""
    sizes: dict[int, int] = {}
    unvisited = [model]
    seen = set[int]()
    while unvisited:
        item = unvisited.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            sizes[item.data_ptr()] = max(item.nbytes, sizes.get(item.data_ptr(), 0))
        elif isinstance(item, list | tuple):
            unvisited += item
        elif type(item).__module__.startswith("quire."):
            unvisited += [
                value for name, value in getattr(item, "__dict__", {}).items() if name not in ("cache", "rotary")
            ]
    return sum(sizes.values())


def measure_quantization() -> Any:
    """Measure the bytes of the bundled model's weights, and their effect on the logprobs of 600 output tokens."""
    found = {}
    exact = list[float]()
    params = SamplingParams(max_tokens=600, seed=1, temperature=1, ignore_eos=True)
    text = engine(max_num_seqs=1).generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0].token_ids
    for title, options in {
        "float32": {},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "quantization": "int8"},
        "int4": {"dtype": "bfloat16", "quantization": "int4"},
    }.items():
        llm = engine(max_num_seqs=1, **options)
        (output,) = llm.generate(
            [{"prompt_token_ids": list(text)}], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False
        )
        assert output.prompt_logprobs is not None
        scores = [
            entries[token].logprob
            for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if entries is not None
        ]
        executor: Any = llm.core.executor
        exact = exact or scores
        changes = [abs(score - true) for score, true in zip(scores, exact, strict=True)]
        found[title] = {
            "bytes": weight_bytes(executor.runner.model),
            "perplexity": math.exp(-sum(scores) / len(scores)),
            "change": sum(changes) / len(changes),
        }
    return found


def draw_quantization(data: Any, figure: Figure) -> None:
    names = list(data)
    rows = list(data.values())
    left = axes(figure, "", "MB of weights", place=(1, 2, 1))
    left.bar(names, [row["bytes"] / 1e6 for row in rows], 0.6, color=BLUE)
    label_bars(left, form="{:.1f}")
    right = axes(figure, "", "mean change of a log-probability", place=(1, 2, 2))
    right.bar(names, [row["change"] for row in rows], 0.6, color=ORANGE)
    label_bars(right, form="{:.3f}")
    for part in (left, right):
        part.grid(axis="x", visible=False)
