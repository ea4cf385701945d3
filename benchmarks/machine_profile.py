"""Measures how close the threads and step sizes chosen from the machine's profile are to the best ones.

    python benchmarks/machine_profile.py --model DIR_OR_GGUF [--cpu-isa avx2] [--quantization int8] [--max-threads 2]

Measures this machine, as an idle engine does. Then it computes a prompt with steps of 128 to 2,048 tokens and decodes
one stream, with each number of threads, interleaved. Prints a table of the best of several rounds, and the chosen
setting's speed relative to the best setting.

--cpu-time: measure the processor time of one thread, which other programs disturb less. In this case, only the step
sizes are compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.models.description import describe
from quire.ops.cpu.build import choose_instruction_set, library
from quire.platform.machine_profile import MachineProfile
from quire.worker.machine_defaults import SIZES, USUAL, WITHIN, Estimate, work_of
from quire.worker.machine_speed import SECONDS, KernelProbe, Measurement, Point, Sample, thread_counts

DECODED = 32  # tokens of the stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint directory or GGUF file; the bundled model if left out")
    parser.add_argument("--cpu-isa", default="native")
    parser.add_argument("--quantization")
    parser.add_argument("--layers", type=int, help="of the model, with random weights: so many instead of its own")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--max-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    a = parser.parse_args()
    most, clock = (1, time.process_time) if a.cpu_time else (a.max_threads, time.perf_counter)
    choose_instruction_set(a.cpu_isa)
    library()
    profile, seconds = measure(most, a.cpu_time)
    quiet = "a quiet machine" if profile.is_quiet else "a busy machine, so that an engine would keep the defaults"
    print(f"Profile: {seconds:.2f} s, noise {profile.noise:.1%}, {profile.share:.0%} of the time: {quiet}\n")

    options: dict[str, Any] = {"max_model_len": a.prompt + 2 * DECODED, "max_num_seqs": 8, "cpu_isa": a.cpu_isa}
    if a.layers:
        options |= {"hf_overrides": {"num_hidden_layers": a.layers}, "load_format": "dummy"}
    llm = LLM(
        a.model,
        max_num_batched_tokens=max(SIZES),
        enable_prefix_caching=False,
        quantization=a.quantization,
        num_gpu_blocks_override=2 * (a.prompt + 2 * DECODED) // 16,
        **options,
    )
    description = describe(llm.frontend.directory, llm.config.model)
    work = work_of(description.spec, description.config, a.quantization, llm.frontend.directory)
    estimate = Estimate(profile, work)
    best = run(llm, thread_counts(most), a.prompt, a.rounds, clock)
    report(estimate, best, a.prompt)


def measure(threads: int, by_cpu_time: bool) -> tuple[MachineProfile, float]:
    """Return the profile, and how long measuring it took."""
    began = time.perf_counter()
    probe = KernelProbe()

    def processor_time(point: Point) -> Sample:
        sample = probe(point)
        return replace(sample, seconds=sample.processor_seconds)

    clock = time.process_time if by_cpu_time else time.perf_counter
    measurement = Measurement(threads, probe.kinds, processor_time if by_cpu_time else probe, SECONDS, clock)
    while measurement.proceed():
        pass
    taken = time.perf_counter() - began
    profile = measurement.profile()
    if not profile.rates:
        raise SystemExit("the machine is too busy to be measured")
    return profile, taken


def run(
    llm: LLM, threads: list[int], prompt: int, rounds: int, clock: Callable[[], float]
) -> dict[tuple[int, int], float]:
    """Return the minimum seconds by threads and tokens per step. Decoding one stream has 1 token per step."""
    limits = llm.core.scheduler.limits
    rng = random.Random(0)
    tokens = [rng.randrange(100, 10_000) for _ in range(prompt)]
    least: dict[tuple[int, int], float] = {}
    settings = [(count, size) for size in (1, *SIZES) for count in threads]
    for number in tqdm(range(rounds + 1), desc="rounds, the first to warm up", file=sys.stderr):
        for count, size in settings if number else settings[: 2 * len(threads)]:
            torch.set_num_threads(count)
            llm.core.scheduler.limits = replace(limits, max_num_batched_tokens=max(size, SIZES[0]))
            given, wanted = (tokens[:16], DECODED) if size == 1 else (tokens, 1)
            began = clock()
            llm.generate(
                [{"prompt_token_ids": given}],
                SamplingParams(max_tokens=wanted, temperature=0, ignore_eos=True),
                use_tqdm=False,
            )
            if number:
                least[count, size] = min(clock() - began, least.get((count, size), float("inf")))
    return least


def report(estimate: Estimate, least: dict[tuple[int, int], float], prompt: int) -> None:
    counts = sorted({count for count, _ in least})
    chosen, chunk = (estimate.threads(), estimate.chunk()) if estimate.is_usable else (max(counts), USUAL)
    best = {size: min(least[count, size] for count in counts) for size in (1, *SIZES)}
    fastest = min(best[size] for size in SIZES)
    print(
        "| | "
        + " | ".join(f"{count} threads" for count in counts)
        + " | estimated |\n|---"
        + "|---" * (1 + len(counts))
        + "|"
    )
    for size in SIZES:
        rates = [f"{prompt / least[count, size]:,.0f} ({fastest / least[count, size]:.1%})" for count in counts]
        estimated = f"{size / estimate.seconds(size):,.0f}"
        print(f"| prompt, steps of {size:,} | {' | '.join(rates)} | {estimated} |")
    rates = [f"{DECODED / least[count, 1]:,.1f} ({best[1] / least[count, 1]:.1%})" for count in counts]
    print(f"| one stream | {' | '.join(rates)} | {1 / estimate.seconds(1):,.1f} |")
    shares = {"prompts": fastest / least[chosen, chunk], "one stream": best[1] / least[chosen, 1]}
    reached = ", ".join(f"{share:.1%} of the best for {name}" for name, share in shares.items())
    print(f"\nChosen: {chosen} threads, steps of {chunk:,} tokens: {reached} (goal: {WITHIN:.0%})")


if __name__ == "__main__":
    main()
