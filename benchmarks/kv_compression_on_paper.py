"""Estimates KV compression's effect on an H100's throughput, with the real scheduler and computed step times.

    python -m benchmarks.kv_compression_on_paper

Llama-3.1-8B in bfloat16: 16 GB of weights, and 128 KiB of keys and values for a token. 54 GB are left for the KV cache.
Requests always wait. A step takes as long as the slower of the GPU and the host:

    GPU    reading the weights, or the products of its tokens if these take longer (600 TFLOP/s); attention of prompts
           (400 TFLOP/s); reading the cached keys and values of requests that decode (3.35 TB/s x 0.91)
    host   with compression, launching each kernel of 32 layers, since there are no CUDA graphs
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import Any

from benchmarks.gpu.rates import HOST_OPERATION, HOST_STEP
from quire.config.kv_compression import KVCompressionOptions
from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.planner.devices import DEVICES
from quire.scheduler.compression import Compression
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

PARAMETERS = 8e9
HIDDEN = 4096
LAYERS = 32
TOKEN_BYTES = 131_072
POOL_BYTES = 54e9
BANDWIDTH = DEVICES["H100"].reached_bandwidth
PRODUCTS = 600e12
ATTENTION = 400e12
OPERATIONS = 14  # of a layer
BLOCK = 16
BUDGET = 8192


def rate(prompt: int, output: int, ratio: float, requests: int) -> tuple[float, float, float]:
    """Concurrent decoding requests, output tokens per second in steps without prompts, and over all steps."""
    limits = SchedulerLimits(1024, BUDGET, prompt + output, depth=1)
    compression = None if ratio == 1 else Compression(KVCompressionOptions(ratio=ratio), BLOCK)
    blocks = int(POOL_BYTES / TOKEN_BYTES / BLOCK)
    scheduler = Scheduler(limits, blocks, [attention_spec([0])], BLOCK, False, compression=compression)
    waiting = deque(
        EngineCoreRequest(str(i), [7] * prompt, SamplingParams(max_tokens=output), seed=0, max_tokens=output)
        for i in range(requests)
    )
    host = HOST_STEP + (0 if ratio == 1 else LAYERS * OPERATIONS * HOST_OPERATION)
    seconds = 0.0
    tokens = 0
    ended = 0
    decoding: list[tuple[int, float]] = []  # rows and seconds of steps without prompts
    while waiting or scheduler.requests:
        while waiting and len(scheduler.waiting) < 4:
            scheduler.add(waiting.popleft())
        step = scheduler.schedule()
        rows: list[Any] = scheduler._submitted[-1][1]
        read = 0
        pairs = 0.0
        sampled = []
        for request, count in zip(rows, step.num_tokens, strict=True):
            start = request.num_computed_tokens - count
            stop = request.num_computed_tokens
            if start >= prompt:
                read += stop - request.blocks.num_removed_tokens
            else:
                pairs += count * (start + stop) / 2
            sampled.append([9] if stop == len(request.token_ids) else [])
        total = sum(step.num_tokens)
        gpu = max(2 * PARAMETERS / BANDWIDTH, 2 * PARAMETERS * total / PRODUCTS)
        gpu += 4 * HIDDEN * LAYERS * pairs / ATTENTION + read * TOKEN_BYTES / BANDWIDTH
        outputs = scheduler.update(ModelRunnerOutput(step.step_id, sampled))
        ended += sum(output.finish_reason is not None for output in outputs)
        if requests // 4 < ended < requests * 3 // 4:  # neither the beginning nor the end
            seconds += max(gpu, host)
            tokens += sum(map(len, sampled))
            if not pairs:
                decoding.append((len(rows), max(gpu, host)))
    most = max(count for count, _ in decoding)
    full = [(count, time) for count, time in decoding if count >= 0.9 * most]
    return most, sum(count for count, _ in full) / sum(time for _, time in full), tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="6000x500,6000x2000,30000x2000", help="prompt x output, in tokens")
    options = parser.parse_args()
    print("| prompt, output | ratio | requests at once | decoding, tokens/s | with prompts, tokens/s |")
    print("|---|---|---|---|---|")
    for lengths in options.lengths.split(","):
        prompt, output = map(int, lengths.split("x"))
        base: tuple[float, ...] = ()
        for ratio in (1, 2, 4, 8, 16):
            found = rate(prompt, output, ratio, 1200 if prompt < 10_000 else 300)
            base = base or found
            cells = [f"{value:,.0f} ({value / whole:.2f} ×)" for value, whole in zip(found, base, strict=True)]
            print(f"| {prompt:,}, {output:,} | {ratio} × | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
