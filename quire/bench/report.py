"""The report of `quire bench serve`: statistics with vLLM's names, and a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.bench.serve import Outcome

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_QUEUE = "client_queue_time"
_Array = NDArray[Any]


def samples(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the samples of each metric in milliseconds, from successful requests.

    Outputs that have one token or arrived in one piece have no TPOT, since the times of their tokens are unknown.
    """
    done = [o for o in outcomes if not o.error]
    return {
        "ttft": [o.ttft * 1e3 for o in done],
        "tpot": [o.tpot * 1e3 for o in done if o.output_len > 1 and o.itls],
        "itl": [gap * 1e3 for o in done for gap in o.itls],
        "e2el": [o.latency * 1e3 for o in done],
    }


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: dict[str, float],
) -> dict[str, Any]:
    """Return the result with the names of `vllm bench serve`. A statistic without samples is None.

    goodput: metric → limit in milliseconds. A request is good if it exceeds none of them.
    """
    done = [o for o in outcomes if not o.error]
    total_in = sum(o.prompt_len for o in done)
    total_out = sum(o.output_len for o in done)
    good = [o for o in done if all(_of_request(o, name) <= limit for name, limit in goodput.items())]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(done) / duration,
        "request_goodput": len(good) / duration if goodput else None,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        "max_output_tokens_per_s": _peak_rate(done, duration),
        "max_concurrent_requests": int(running(outcomes)[1].max(initial=0)),
    }
    values = samples(outcomes)
    if any(o.queue_time > 1e-3 for o in outcomes):  # --max-concurrency delayed some requests
        values[_QUEUE] = [o.queue_time * 1e3 for o in done]
    for name in [*metrics, *values.keys() - METRICS.keys()]:
        sample = values[name]
        for statistic, function in (("mean", np.mean), ("median", np.median), ("std", np.std)):
            result[f"{statistic}_{name}_ms"] = float(function(sample)) if sample else None
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(sample, p)) if sample else None
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return lists with one entry per request. Times are in seconds."""
    fields = {"input_lens": "prompt_len", "output_lens": "output_len", "start_times": "start", "ttfts": "ttft"}
    fields |= {"itls": "itls", "latencies": "latency", "queue_times": "queue_time"}
    fields |= {"generated_texts": "text", "errors": "error"}
    return {name: [getattr(outcome, attribute) for outcome in outcomes] for name, attribute in fields.items()}


def table(result: dict[str, Any], outcomes: Sequence[Outcome], percentiles: Sequence[float]) -> str:
    """Return the result as a text table."""
    counts = {
        "requests completed, failed": f"{result['completed']:,}, {result['failed']:,}",
        "duration": f"{result['duration']:.2f} s",
        "tokens in, out": f"{result['total_input_tokens']:,}, {result['total_output_tokens']:,}",
        "request throughput": f"{result['request_throughput']:.2f} /s",
        "output token throughput": f"{result['output_throughput']:,.1f} /s",
        "total token throughput": f"{result['total_token_throughput']:,.1f} /s",
        "peak output token throughput": f"{result['max_output_tokens_per_s']:,.1f} /s",
        "peak concurrent requests": f"{result['max_concurrent_requests']}",
    }
    if result["request_goodput"] is not None:
        share = result["request_goodput"] / result["request_throughput"] if result["completed"] else 0.0
        counts["request goodput"] = f"{result['request_goodput']:.2f} /s ({share:.1%} of those completed)"
    width = max(map(len, [*counts, *METRICS.values()])) + 7
    lines = [f"{name:<{width}}  {value}" for name, value in counts.items()]
    columns = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    lines += ["", f"{'milliseconds':<{width}}" + "".join(f"{column:>11}" for column in columns)]
    for name, title in {**METRICS, _QUEUE: "wait for --max-concurrency"}.items():
        if f"mean_{name}_ms" in result:
            row = [result[f"{column}_{name}_ms"] for column in columns]
            label = title if name == _QUEUE else f"{title} ({name.upper()})"
            lines.append(f"{label:<{width}}" + "".join("          –" if v is None else f"{v:>11,.2f}" for v in row))
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    if errors:
        lines += ["", "failures"] + [f"{count:>6} × {error}" for error, count in errors.most_common(5)]
        if len(errors) > 5:
            lines.append(f"{'':>8} and {len(errors) - 5} other kinds")
    return "\n".join(lines)


def _of_request(outcome: Outcome, name: str) -> float:
    return 1e3 * {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}[name]


def token_times(outcomes: Sequence[Outcome]) -> tuple[_Array, _Array]:
    """Return (times of events with tokens in seconds, average number of tokens per event of the same request)."""
    times = [o.start + np.cumsum([o.ttft, *o.itls]) for o in outcomes]
    weights = [np.full(1 + len(o.itls), o.output_len / (1 + len(o.itls))) for o in outcomes]
    return (np.concatenate(times), np.concatenate(weights)) if times else (np.zeros(0), np.zeros(0))


def _peak_rate(outcomes: Sequence[Outcome], duration: float) -> float:
    """Return the highest number of tokens per second in a window of the run.

    The run is divided into equal windows of one second or a little more, so the peak is never below the mean. A run of
    less than two seconds is one window.
    """
    times, weights = token_times(outcomes)
    count = max(1, int(duration))
    windows = np.minimum((times * (count / duration)).astype(int), count - 1)
    return float(np.bincount(windows, weights, count).max()) * count / duration


def running(outcomes: Sequence[Outcome]) -> tuple[_Array, _Array]:
    """Return (times in seconds at which a request started or ended, the number of running requests from then on)."""
    changes = sorted([(o.start, 1) for o in outcomes] + [(o.start + o.latency, -1) for o in outcomes])
    return np.array([t for t, _ in changes]), np.cumsum([change for _, change in changes])
