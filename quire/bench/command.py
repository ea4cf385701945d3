"""`quire bench serve`: its flags, which have vLLM's names, and the run of the benchmark."""

import argparse
import asyncio
import importlib
import json
import sys
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.flags import REQUEST_FLAGS, Flag, add_flags, make_requests
from quire.bench.vllm_flags import BACKENDS, add_vllm_flags, backend

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest

HELP = "latency and throughput of an OpenAI-compatible server under load"
DESCRIPTION = """Send requests to a server at a rate (--request-rate), at a fixed concurrency (--max-concurrency), or at
the times of a trace (--trace). Stream the answers, and report latencies and throughput. TTFT and end-to-end latency
start when a request is sent; the wait for --max-concurrency is reported separately. ITL is the gap between two events
that contain tokens. TPOT is the time after the first token divided by the number of later tokens. Token counts come
from the server's usage, or from the events with text if the server reports none."""


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _metrics(text: str) -> list[str]:
    if not set(text.split(",")) <= {"ttft", "tpot", "itl", "e2el"}:
        raise argparse.ArgumentTypeError(f"{text!r} has others than ttft, tpot, itl and e2el")
    return text.split(",")


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has numbers that are not from 0 to 100")
    return values


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or float(limit) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2el:MS")
    return name, float(limit)


_GROUPS: dict[tuple[str, str | None], list[Flag]] = {
    ("Server", None): [
        ("--base-url", str, None, "URL of the server, such as https://example.com, instead of --host and --port"),
        ("--host", str, "127.0.0.1", "address of the server"),
        ("--port", int, 8000, "port of the server"),
        ("--backend --endpoint-type", backend, "openai", "openai (or vllm) for completions, openai-chat for chats"),
        ("--endpoint", str, None, "path on the server (default: the path of the backend)"),
        ("--served-model-name", str, None, "the model's name on the server (default: the value of --model)"),
        ("--insecure", bool, False, "do not check the server's certificate"),
        ("--ready-check-timeout-sec", float, 0.0, "seconds to wait for a server that does not answer yet"),
        ("--request-id-prefix", str, None, "send an X-Request-Id that consists of this prefix and a number"),
        ("--header", [_header], [], "KEY=VALUE ...: HTTP headers of each request"),
        ("--extra-body", _json_object, {}, "JSON: fields of each request; null removes a field, such as temperature"),
        ("--ignore-eos", bool, False, "request outputs of the full length"),
    ],
    ("Requests", "Random prompts are token ids below the vocabulary's size, which --vocab-size or the server's list of "
     "models gives. If neither does, they are ids below 1000, which every vocabulary has. Chat endpoints and servers "
     "that accept no token ids get English words of about the same length by the server's own count."): [
        *REQUEST_FLAGS,
        ("--trace", Path, None, 'replay a file, one request per line: "arrival" (s) or "timestamp" (ms); "prompt", '
         '"prompt_token_ids" or "input_length", with Mooncake\'s optional "hash_ids"; "output_length"'),
        ("--vocab-size", int, None, "upper limit of random token ids (exclusive)"),
        ("--num-warmups", int, 0, "unmeasured random requests before the run, with the lengths of its first requests"),
        ("--seed", int, 0, "seed of prompts and arrivals; a repeated seed may hit prefixes in the cache"),
    ],
    ("Sampling, for each request", None): [
        ("--temperature", float, None, "temperature of sampling (default: 0)"),
        ("--top-p", float, None, "top_p of each request"),
        ("--top-k", int, None, "top_k of each request"),
        ("--min-p", float, None, "min_p of each request"),
        ("--frequency-penalty", float, None, "frequency_penalty of each request"),
        ("--presence-penalty", float, None, "presence_penalty of each request"),
        ("--repetition-penalty", float, None, "repetition_penalty of each request"),
        ("--logprobs", int, None, "request the log-probabilities of this many tokens at each position"),
        ("--chat-template-kwargs", _json_object, None, "JSON: arguments for the server's chat template"),
    ],
    ("Load", None): [
        ("--request-rate", float, None, "requests per second (default: inf, which sends all at once)"),
        ("--burstiness", float, 1.0, "shape of the gamma distribution of gaps: 1 is a Poisson process, a smaller value "
         "is more bursty"),
        ("--max-concurrency", int, None, "maximum number of requests that run at once"),
        ("--ramp-up-strategy", ("linear", "exponential"), None, "let the request rate grow during the run, instead of "
         "--request-rate"),
        ("--ramp-up-start-rps", float, None, "requests per second at the beginning"),
        ("--ramp-up-end-rps", float, None, "requests per second at the end"),
    ],
    ("Report", None): [
        ("--percentile-metrics", _metrics, "ttft,tpot,itl,e2el", "metrics to report"),
        ("--metric-percentiles", _percentiles, "99", "percentiles to report, such as 50,90,99.9"),
        ("--goodput", [_goodput], [], "NAME:MS ...: count requests within limits, such as ttft:500 tpot:50 e2el:9000"),
        ("--plot", Path, None, "FILE.png: plot distributions and a timeline"),
        ("--save-result", bool, False, "write the result as JSON, with vLLM's field names"),
        ("--save-detailed", bool, False, "add each request's times, text and error to the result"),
        ("--result-dir", Path, Path(), "directory of the result"),
        ("--result-filename", str, None, "name of the file of the result (default: label, rate, model and date)"),
        ("--append-result", bool, False, "append to the result's file instead of replacing it"),
        ("--label", str, "quire", "name of this run, in the result and in its file's name"),
        ("--metadata", [_header], [], "KEY=VALUE ...: additional fields of the result"),
        ("--disable-tqdm", bool, False, "disable the progress bar, which only a terminal shows"),
    ],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for (title, description), flags in _GROUPS.items():
        add_flags(parser.add_argument_group(title, description), flags)
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 if any request succeeded. Raises ValueError for wrong flags, OSError if no server answers."""
    for module in ("aiohttp", *(["matplotlib"] if arguments.plot else [])):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise RuntimeError(f'quire bench serve needs {module}: pip install "quire[bench]"') from error
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
        hide = a.disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(requests), desc="requests", disable=hide, dynamic_ncols=True) as bar:
            outcomes, duration = await serve.drive(target, requests, times, a.max_concurrency, partial(_count, bar))
    result = report.summarize(outcomes, duration, a.percentile_metrics, a.metric_percentiles, goodput)
    title = f"{target.model} at {target.url} · {len(requests)} requests, {_load(a)}"
    print(f"{title}\n\n{report.table(result, outcomes, a.metric_percentiles)}")
    if a.save_result or a.save_detailed or a.append_result or a.result_filename:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        record = {"date": now, "label": a.label, "backend": a.backend, "endpoint": endpoint, "model_id": target.model,
                  "num_prompts": len(requests), "request_rate": _rate(a), "burstiness": a.burstiness,
                  "max_concurrency": a.max_concurrency, **dict(a.metadata), **result,
                  **(report.details(outcomes) if a.save_detailed else {})}  # fmt: skip
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
    """The fields of each request that the flags set."""
    names = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty chat_template_kwargs"
    fields = {name: getattr(a, name) for name in names.split() if getattr(a, name) is not None}
    if a.logprobs is not None and endpoint.endswith("/chat/completions"):
        fields |= {"logprobs": True, "top_logprobs": a.logprobs}
    elif a.logprobs is not None:
        fields["logprobs"] = a.logprobs
    return {**fields, **({"ignore_eos": True} if a.ignore_eos else {}), **a.extra_body}


def _arrivals(a: argparse.Namespace, requests: "list[BenchRequest]", rng: Any) -> list[float]:
    """The arrival of each request, in seconds from the start."""
    from quire.bench.datasets import arrival_times, ramp_up_times

    if a.trace:
        return [request.arrival for request in requests]
    if a.ramp_up_strategy:
        ends = (a.ramp_up_start_rps, a.ramp_up_end_rps)
        return ramp_up_times(len(requests), a.ramp_up_strategy, *ends, a.burstiness, rng)
    rate = float("inf") if a.request_rate is None else a.request_rate
    return arrival_times(len(requests), rate, a.burstiness, rng)


def _rate(a: argparse.Namespace) -> str | float:
    """The request rate as it is written to the result."""
    if a.trace:
        return "trace"
    if a.ramp_up_strategy:
        return f"{a.ramp_up_start_rps:g}-{a.ramp_up_end_rps:g}"
    return "inf" if a.request_rate in (None, float("inf")) else float(a.request_rate)


def _load(a: argparse.Namespace) -> str:
    """A description of the load for the title."""
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
