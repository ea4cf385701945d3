"""What adapters cost: a decode batch of 16 over 8 adapters, mixed batches, and batches without any adapter.

    python benchmarks/lora.py                  # five rounds; about ten minutes on two cores
    python benchmarks/lora.py --rounds 3 --rank 16 --layers 8

Two engines with Qwen3-0.6B's shapes and random weights are in this process, one with --enable-lora and one without.
They work in turns: in each round, every workload once, in an order that changes. A workload is the decoding of 16
requests; the time of a run with 8 tokens is subtracted from that of one with 40, so that prompts do not count. Reported
are medians over the rounds, and the ratios of the rounds to the engine without adapters, in seconds and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.guard import CONFIG
from quire import LLM, SamplingParams
from quire.loading.hub import bundled_model
from quire.lora import LoRARequest

SIZES = {"self_attn.q_proj": (2048, 1024), "self_attn.k_proj": (1024, 1024), "self_attn.v_proj": (1024, 1024),
         "self_attn.o_proj": (1024, 2048), "mlp.gate_proj": (3072, 1024), "mlp.up_proj": (3072, 1024),
         "mlp.down_proj": (1024, 3072)}  # fmt: skip
SHORT, LONG = 8, 40  # tokens of output
REQUESTS = 16


def write_adapter(directory: Path, layers: int, rank: int, seed: int) -> LoRARequest:
    draw, tensors = torch.Generator().manual_seed(seed), {}
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


def decode(llm: LLM, adapters: list[LoRARequest | None], seed: int) -> tuple[float, float]:
    """(seconds, CPU seconds) a step of REQUESTS requests."""
    times = []
    for tokens in (SHORT, LONG):
        draw = random.Random(seed)
        texts = [[draw.randint(3, 4000) for _ in range(16)] for _ in range(REQUESTS)]
        llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        llm.generate(texts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    (wall, cpu), (long_wall, long_cpu) = times
    return (long_wall - wall) / (LONG - SHORT), (long_cpu - cpu) / (LONG - SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--quantization")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": options.layers}))
        made = [write_adapter(Path(folder) / f"a{i}", options.layers, options.rank, i) for i in range(8)]
        common: dict[str, Any] = {
            "load_format": "dummy", "tokenizer": str(bundled_model()), "max_model_len": 1024,
            "num_gpu_blocks_override": 400, "max_num_seqs": REQUESTS, "quantization": options.quantization,
        }  # fmt: skip
        plain = LLM(str(model), **common)
        with_lora = LLM(str(model), enable_lora=True, max_loras=8, max_lora_rank=options.rank, **common)
        none: list[LoRARequest | None] = [None] * REQUESTS
        workloads: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
            "without --enable-lora": (plain, none),
            "no request has an adapter": (with_lora, none),
            "1 of 16 requests has one": (with_lora, [made[0], *none[1:]]),
            "16 requests, 1 adapter": (with_lora, [made[0]] * REQUESTS),
            "16 requests, 8 adapters": (with_lora, [made[i % 8] for i in range(REQUESTS)]),
        }
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in workloads}
        for turn in range(-1, options.rounds):  # the first round loads adapters and records steps
            names = [*workloads]
            random.Random(turn).shuffle(names)
            measured = {name: decode(*workloads[name], seed=turn) for name in names}
            if turn >= 0:
                for name, times in measured.items():
                    rounds[name].append(times)
    base = rounds["without --enable-lora"]
    print(f"\n| rank {options.rank}, {options.layers} layers | ms a step | ratio | spread | CPU s ratio |")
    print("|---|---|---|---|---|")
    for name, times in rounds.items():
        walls = sorted(t[0] / b[0] for t, b in zip(times, base, strict=True))
        cpus = statistics.median(t[1] / b[1] for t, b in zip(times, base, strict=True))
        step = 1e3 * statistics.median(t[0] for t in times)
        print(f"| {name} | {step:.1f} | {statistics.median(walls):.3f} | {walls[0]:.2f}-{walls[-1]:.2f} | {cpus:.3f} |")


if __name__ == "__main__":
    main()
