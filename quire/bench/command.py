"""`quire bench serve`: the run of the benchmark."""

import argparse
import asyncio
import importlib
import json
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.bench.flags import BACKENDS, make_requests
from quire.platform.extras import install_command

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest


def run(arguments: argparse.Namespace) -> int:
    """Return exit status 0 if any request succeeded. Raises ValueError for wrong flags, OSError if no server
    answers."""
    for module in ("aiohttp", *(["matplotlib"] if arguments.plot else [])):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise RuntimeError(f"quire bench serve needs {module}: {install_command('bench')}") from error
    return asyncio.run(_bench(arguments))


async def _bench(a: argparse.Namespace) -> int:
    import numpy as np
    from tqdm import tqdm

    from quire.bench import report, serve
    from quire.bench.datasets import RandomPrompts

    _check(a)
    goodput = dict(a.goodput)
    rng = np.random.default_rng(a.seed)
    base_url = a.base_url or f"http://{a.host}:{a.port}"
    endpoint = a.endpoint or BACKENDS[a.backend]
    model = a.served_model_name or a.model
    options = {"request_id_prefix": a.request_id_prefix, "check_certificate": not a.insecure}
    async with serve.Target(base_url, endpoint, model, dict(a.header), _fields(a, endpoint), **options) as target:
        await target.find_model(a.ready_check_timeout_sec)
        prompts = RandomPrompts(rng, a.vocab_size)
        await target.find_prompts(prompts)
        requests = make_requests(a, prompts, a.trace)
        times = _arrivals(a, requests, rng)
        warmups = [replace(r, prompt=prompts.make(max(r.prompt_len, 1))) for r in requests[: a.num_warmups]]
        await serve.drive(target, warmups, [0.0] * len(warmups), a.max_concurrency)
        if a.profile:
            await target.order("/start_profile")
        hide = a.disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(requests), desc="requests", disable=hide, dynamic_ncols=True) as bar:
            outcomes, duration = await serve.drive(target, requests, times, a.max_concurrency, partial(_count, bar))
        if a.profile:
            await target.order("/stop_profile")
    result = report.summarize(outcomes, duration, a.percentile_metrics, a.metric_percentiles, goodput)
    title = f"{target.model} at {target.url} · {len(requests)} requests, {_load(a)}"
    print(f"{title}\n\n{report.table(result, outcomes, a.metric_percentiles)}")
    if a.save_result or a.save_detailed or a.append_result or a.result_filename:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        record = {
            "date": now,
            "label": a.label,
            "backend": a.backend,
            "endpoint": endpoint,
            "model_id": target.model,
            "num_prompts": len(requests),
            "request_rate": _rate(a),
            "burstiness": a.burstiness,
            "max_concurrency": a.max_concurrency,
            **dict(a.metadata),
            **result,
            **(report.details(outcomes) if a.save_detailed else {}),
        }
        _save(a, record)
    if a.plot:
        from quire.bench import plot

        plot.plot(a.plot, title, outcomes, duration, goodput)
    return 0 if result["completed"] else 1


def _check(a: argparse.Namespace) -> None:
    """Raises ValueError for flags that contradict each other."""
    if a.trace and (a.request_rate is not None or a.ramp_up_strategy):
        raise ValueError("--trace sets the times of arrival; leave out --request-rate and --ramp-up-strategy")
    if a.ramp_up_strategy and a.request_rate is not None:
        raise ValueError("--ramp-up-strategy sets the request rate; leave out --request-rate")
    if a.ramp_up_strategy and (a.ramp_up_start_rps is None or a.ramp_up_end_rps is None):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if a.max_concurrency is not None and a.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {a.max_concurrency}")


def _fields(a: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """Return the request fields that the flags set."""
    names = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty chat_template_kwargs"
    fields = {name: getattr(a, name) for name in names.split() if getattr(a, name) is not None}
    if a.logprobs is not None and endpoint.endswith("/chat/completions"):
        fields |= {"logprobs": True, "top_logprobs": a.logprobs}
    elif a.logprobs is not None:
        fields["logprobs"] = a.logprobs
    return {**fields, **({"ignore_eos": True} if a.ignore_eos else {}), **a.extra_body}


def _arrivals(a: argparse.Namespace, requests: "list[BenchRequest]", rng: Any) -> list[float]:
    """Return the arrival of each request, in seconds from the start."""
    from quire.bench.datasets import arrival_times, ramp_up_times

    if a.trace:
        return [request.arrival for request in requests]
    if a.ramp_up_strategy:
        ends = (a.ramp_up_start_rps, a.ramp_up_end_rps)
        return ramp_up_times(len(requests), a.ramp_up_strategy, *ends, a.burstiness, rng)
    rate = float("inf") if a.request_rate is None else a.request_rate
    return arrival_times(len(requests), rate, a.burstiness, rng)


def _rate(a: argparse.Namespace) -> str | float:
    """Return the request rate as written to the result."""
    if a.trace:
        return "trace"
    if a.ramp_up_strategy:
        return f"{a.ramp_up_start_rps:g}-{a.ramp_up_end_rps:g}"
    return "inf" if a.request_rate in (None, float("inf")) else float(a.request_rate)


def _load(a: argparse.Namespace) -> str:
    """Return a description of the load for the title."""
    rate = f"{a.request_rate:g}" if a.request_rate is not None else _rate(a)
    load = f"trace {a.trace.name}" if a.trace else f"{rate} requests/s, burstiness {a.burstiness:g}"
    return load + (f", at most {a.max_concurrency} at once" if a.max_concurrency else "")


def _save(a: argparse.Namespace, record: dict[str, Any]) -> None:
    concurrency = f"-concurrency{a.max_concurrency}" if a.max_concurrency else ""
    model = str(record["model_id"]).rsplit("/", 1)[-1]
    name = a.result_filename or f"{a.label}-{record['request_rate']}qps{concurrency}-{model}-{record['date']}.json"
    a.result_dir.mkdir(parents=True, exist_ok=True)
    with (a.result_dir / name).open("a" if a.append_result else "w", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _count(bar: Any, outcome: Any) -> None:
    if outcome.error:
        bar.failed = getattr(bar, "failed", 0) + 1
        bar.set_postfix_str(f"{bar.failed} failed", refresh=False)
    bar.update()
