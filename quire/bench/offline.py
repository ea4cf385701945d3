"""`quire bench throughput` and `quire bench latency`: measurements of the engine without a server."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quire._version import __version__
from quire.bench.datasets import BenchRequest, read_lines
from quire.engine.llm import LLM
from quire.engine.processor import Prompt
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams

Request = tuple[Prompt, dict[str, Any]]  # (prompt, sampling parameters)

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Timing:
    """A run of simultaneous requests: the seconds from adding the first request to the last output, and token
    counts."""

    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


def read_requests(path: Path) -> list[Request]:
    """Read a file with one JSON object per line. Raises ValueError with the number of an invalid line."""
    return read_lines(path, _request)


def _request(fields: Any) -> Request:
    prompt = fields.pop("prompt_token_ids", None) or fields.pop("prompt", None)
    if not isinstance(prompt, (str, list)):
        raise TypeError('needs "prompt_token_ids" or "prompt"')
    return prompt, fields


def with_params(requests: Sequence[BenchRequest], **params: Any) -> list[Request]:
    """Add sampling parameters to the requests: outputs have exactly the requested length, and temperature is 1 as in
    `vllm bench`."""
    common = {"temperature": 1.0, "ignore_eos": True, **params}
    return [(request.prompt, {**common, "max_tokens": request.output_len}) for request in requests]


def check_lengths(llm: LLM, input_len: int, output_len: int) -> None:
    """Raises ValueError if requests of these lengths exceed the context."""
    for flag, length in (("--input-len", input_len), ("--output-len", output_len)):
        if length < 1:
            raise ValueError(f"{flag} must be at least 1, got {length}")
    if input_len + output_len > llm.max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} need {input_len + output_len} tokens, "
            f"but the context (max_model_len) has {llm.max_model_len}"
        )


def warm_up(llm: LLM) -> None:
    """Run a short request, so that one-time work is not measured."""
    timed(llm, [([0], {"max_tokens": 8, "ignore_eos": True})])
    llm.reset_prefix_cache()


def timed(llm: LLM, requests: Sequence[Request], show_progress: bool = False) -> Timing:
    """Run all requests at once."""
    params = [SamplingParams(**fields) for _, fields in requests]
    prompts = [prompt for prompt, _ in requests]
    started = time.perf_counter()
    outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=show_progress and sys.stderr.isatty())
    return Timing(
        time.perf_counter() - started,
        len(outputs),
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(c.token_ids) for o in outputs for c in o.outputs),
        sum(o.num_cached_tokens for o in outputs),
    )


def throughput_record(total: Timing, prefill: Timing | None, llm: LLM, startup: float) -> dict[str, Any]:
    """Return the result of `bench throughput`. prefill: the prompts with one output token each, if they were run."""
    tokens = total.prompt_tokens + total.output_tokens
    record = {
        "engine": "quire",
        "version": __version__,
        "dtype": llm.dtype,
        "num_requests": total.num_requests,
        "elapsed_time": round(total.seconds, 3),
        "num_prompt_tokens": total.prompt_tokens,
        "num_output_tokens": total.output_tokens,
        "total_num_tokens": tokens,
        "requests_per_second": round(total.num_requests / total.seconds, 3),
        "tokens_per_second": round(tokens / total.seconds, 1),
        "output_tok_s": round(total.output_tokens / total.seconds, 1),
        "total_s": round(total.seconds, 2),
        "startup_s": round(startup, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "cached_tokens": total.cached_tokens,
    }
    if prefill is not None:
        decode_seconds = max(total.seconds - prefill.seconds, 1e-9)
        record["prefill_tok_s"] = round(prefill.prompt_tokens / prefill.seconds, 1)
        record["decode_tok_s"] = round((total.output_tokens - total.num_requests) / decode_seconds, 1)
    return record


def throughput_table(record: dict[str, Any]) -> str:
    """Return the result as text. The first line equals that of `vllm bench throughput`."""
    entries = {
        "requests": f"{record['num_requests']:,} in {record['elapsed_time']:.2f} s",
        "prompt tokens": f"{record['num_prompt_tokens']:,} ({record['cached_tokens']:,} from the prefix cache)",
        "output tokens": f"{record['num_output_tokens']:,}",
    }
    if "prefill_tok_s" in record:
        entries["prefill"] = f"{record['prefill_tok_s']:,.1f} tokens/s (prompts only)"
        entries["decode"] = f"{record['decode_tok_s']:,.1f} tokens/s (all but each request's first token)"
    entries |= {
        "start of the engine": f"{record['startup_s']:.2f} s",
        "peak memory": f"{record['peak_rss_gb']:.2f} GiB",
        "engine": f"Quire {record['version']}, {record['dtype']}",
    }
    headline = (
        f"Throughput: {record['requests_per_second']:.2f} requests/s, "
        f"{record['tokens_per_second']:.2f} total tokens/s, {record['output_tok_s']:.2f} output tokens/s"
    )
    width = max(map(len, entries))
    return "\n".join([headline, "", *(f"{name:<{width}}  {value}" for name, value in entries.items())])


def latencies(llm: LLM, requests: Sequence[Request], warmups: int, iterations: int) -> list[float]:
    """Return the seconds that the batch takes in each of `iterations` runs, after `warmups` uncounted runs."""
    measured = []
    with tqdm(total=warmups + iterations, unit="batch", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        for iteration in range(warmups + iterations):
            bar.set_description_str("warming up" if iteration < warmups else "measuring")
            llm.reset_prefix_cache()
            seconds = timed(llm, requests).seconds
            if iteration >= warmups:
                measured.append(seconds)
            bar.set_postfix_str(f"{seconds:.3f} s")
            bar.update()
    return measured


def profile(llm: LLM, requests: Sequence[Request], warmups: int) -> None:
    """Profile one run of the batch, after `warmups` runs. Raises ValueError if the options name no profiler."""
    latencies(llm, requests, warmups, 0)
    llm.reset_prefix_cache()
    llm.start_profile()
    timed(llm, requests)
    llm.stop_profile()


def latency_record(measured: Sequence[float]) -> dict[str, Any]:
    """Return the result of `bench latency` in seconds, with vLLM's names."""
    percentiles = {str(p): float(np.percentile(measured, p)) for p in _PERCENTILES}
    return {"avg_latency": float(np.mean(measured)), "latencies": list(measured), "percentiles": percentiles}


def latency_table(record: dict[str, Any], batch_size: int, input_len: int, output_len: int) -> str:
    """Return the result as text, as `vllm bench latency` prints it."""
    average = record["avg_latency"]
    count = len(record["latencies"])
    lines = [
        f"Batches of {batch_size} requests, {input_len} tokens in and {output_len} out, {count} times",
        "",
        f"Avg latency: {average:.4f} seconds",
        *(f"{p}% percentile latency: {seconds:.4f} seconds" for p, seconds in record["percentiles"].items()),
        "",
        f"Output: {batch_size * output_len / average:,.1f} tokens/s, {average / output_len * 1e3:.2f} ms per token",
    ]
    return "\n".join(lines)
