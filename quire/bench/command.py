"""`quire bench serve`: its flags, which are vLLM's, and what it does with them."""

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

from quire.bench.vllm_flags import BACKENDS, add_vllm_flags, backend, dataset

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest, RandomPrompts

HELP = "latency and throughput of an OpenAI-compatible server under load"
DESCRIPTION = """Send requests to a server at a rate (--request-rate), at a fixed concurrency (--max-concurrency), or
when a trace says (--trace), stream the answers, and report latencies and throughput. TTFT and end-to-end latency begin
when a request is sent; waiting for --max-concurrency is reported apart. ITL is the gap between two events that brought
tokens; TPOT spreads the same time evenly over all tokens but the first. Tokens are counted by the server's usage, or
else by events with text."""


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


_GROUPS: dict[tuple[str, str | None], list[tuple[str, Any, Any, str]]] = {  # flag, type, default, help
    ("Server", None): [
        ("--base-url", str, None, "such as https://example.com, instead of --host and --port"),
        ("--host", str, "127.0.0.1", ""),
        ("--port", int, 8000, ""),
        ("--backend", backend, "openai", "openai (or vllm) for completions, openai-chat for chats"),
        ("--endpoint", str, None, "path on the server, if it is not that of the backend"),
        ("--served-model-name", str, None, "the model's name on the server, if it is not that of --model"),
        ("--insecure", bool, False, "do not check the server's certificate"),
        ("--ready-check-timeout-sec", float, 0.0, "seconds to wait for a server that does not answer yet"),
        ("--request-id-prefix", str, None, "send X-Request-Id: this and a number"),
        ("--header", [_header], [], "KEY=VALUE ...: HTTP headers of each request"),
        ("--extra-body", _json_object, {}, "JSON: fields for each request; null removes one (temperature 0, say)"),
        ("--ignore-eos", bool, False, "ask for outputs of the full length"),
    ],
    ("Requests", "Random prompts are token ids from a vocabulary whose size --vocab-size or the list of models gives; "
     "else from the ids below 1000, which every vocabulary has. Chat endpoints, and servers that take no ids, "
     "get English words, as many as make about that length by the server's own count."): [
        ("--dataset-name", dataset, "random", "random, prefix_repetition or custom"),
        ("--dataset-path", Path, None, 'for custom, a line a request: {"prompt" or "prompt_token_ids": ..., '
         '"output_tokens": ...}'),
        ("--trace", Path, None, 'replay a file, a line a request: "arrival" (s) or "timestamp" (ms); "prompt", '
         '"prompt_token_ids" or "input_length", with Mooncake\'s "hash_ids" if there; "output_length"'),
        ("--input-len", int, None, "the same as --random-input-len"),
        ("--output-len", int, None, "tokens in an answer, of any dataset"),
        ("--num-prompts", int, None, "how many; 1000 or the whole file if left out"),
        ("--random-input-len", int, 1024, "tokens in a random prompt"),
        ("--random-output-len", int, 128, "tokens in its answer"),
        ("--random-prefix-len", int, 0, "tokens in front of it that all prompts share"),
        ("--random-range-ratio", float, 0.0, "lengths are uniform within plus or minus this share"),
        ("--prefix-repetition-prefix-len", int, 256, "tokens in a prefix"),
        ("--prefix-repetition-suffix-len", int, 256, "tokens after it"),
        ("--prefix-repetition-num-prefixes", int, 10, "prefixes"),
        ("--prefix-repetition-output-len", int, 128, "tokens in an answer"),
        ("--custom-output-len", int, 256, "tokens in an answer where a file does not say"),
        ("--vocab-size", int, None, "random token ids are below this"),
        ("--num-warmups", int, 0, "unmeasured requests before: random, of the lengths of the first ones"),
        ("--seed", int, 0, "of prompts and arrivals; prefix caches remember the prompts of a seed"),
    ],
    ("Sampling, for each request", None): [
        ("--temperature", float, None, "0 if left out"),
        ("--top-p", float, None, ""),
        ("--top-k", int, None, ""),
        ("--min-p", float, None, ""),
        ("--frequency-penalty", float, None, ""),
        ("--presence-penalty", float, None, ""),
        ("--repetition-penalty", float, None, ""),
        ("--logprobs", int, None, "ask for the log-probabilities of so many tokens at each place"),
        ("--chat-template-kwargs", _json_object, None, "JSON: arguments for the server's chat template"),
    ],
    ("Load", None): [
        ("--request-rate", float, None, "requests a second; inf, all at once, if left out"),
        ("--burstiness", float, 1.0, "shape of the gamma distribution of gaps: 1 is a Poisson process, less is more "
         "bursty"),
        ("--max-concurrency", int, None, "most requests that run at once"),
        ("--ramp-up-strategy", ("linear", "exponential"), None, "let the request rate grow over the run, instead of "
         "--request-rate"),
        ("--ramp-up-start-rps", float, None, "requests a second at the beginning"),
        ("--ramp-up-end-rps", float, None, "requests a second at the end"),
    ],
    ("Report", None): [
        ("--percentile-metrics", _metrics, "ttft,tpot,itl,e2el", "which to report"),
        ("--metric-percentiles", _percentiles, "99", "such as 50,90,99.9"),
        ("--goodput", [_goodput], [], "NAME:MS ...: count requests that meet all of these: ttft:500 tpot:50 e2el:9000"),
        ("--plot", Path, None, "FILE.png: distributions and timeline"),
        ("--save-result", bool, False, "write JSON with the field names of vLLM's"),
        ("--save-detailed", bool, False, "add each request's times, text and error to it"),
        ("--result-dir", Path, Path(), "where"),
        ("--result-filename", str, None, "made from label, rate, model and date if left out"),
        ("--append-result", bool, False, "append to the file instead of replacing it"),
        ("--label", str, "quire", "name of this run, in the result and its file's name"),
        ("--metadata", [_header], [], "KEY=VALUE ...: fields for the result"),
        ("--disable-tqdm", bool, False, "no progress bar (there is none without a terminal)"),
    ],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for (title, description), flags in _GROUPS.items():
        group = parser.add_argument_group(title, description)
        for flag, kind, default, text in flags:
            names = [flag, "--endpoint-type"] if flag == "--backend" else [flag]
            options: dict[str, Any] = {"default": default, "metavar": flag.rsplit("-", 1)[-1].upper()}
            if kind is bool:
                options = {"action": "store_true"}
            elif isinstance(kind, tuple):
                options = {"default": default, "choices": kind}
            elif isinstance(kind, list):
                options |= {"nargs": "+", "type": kind[0]}
            else:
                options["type"] = kind
            shown = f"(default: {default})" if default and kind is not bool else ""
            group.add_argument(*names, help=f"{text} {shown}".strip(), **options)
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 if any request succeeded. Raises ValueError for flags that are wrong, OSError without a server."""
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
        requests = _requests(a, prompts)
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
    """Raises ValueError for flags that do not go together."""
    if a.trace and (a.request_rate is not None or a.ramp_up_strategy):
        raise ValueError("--trace says when requests arrive; leave out --request-rate and --ramp-up-strategy")
    if a.ramp_up_strategy and a.request_rate is not None:
        raise ValueError("--ramp-up-strategy sets the request rate; leave out --request-rate")
    if a.ramp_up_strategy and (a.ramp_up_start_rps is None or a.ramp_up_end_rps is None):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if a.max_concurrency is not None and a.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {a.max_concurrency}")


def _fields(a: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """The fields of each request that flags ask for."""
    names = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty chat_template_kwargs"
    fields = {name: getattr(a, name) for name in names.split() if getattr(a, name) is not None}
    if a.logprobs is not None and endpoint.endswith("/chat/completions"):
        fields |= {"logprobs": True, "top_logprobs": a.logprobs}
    elif a.logprobs is not None:
        fields["logprobs"] = a.logprobs
    return {**fields, **({"ignore_eos": True} if a.ignore_eos else {}), **a.extra_body}


def _arrivals(a: argparse.Namespace, requests: "list[BenchRequest]", rng: Any) -> list[float]:
    """Seconds from the start at which each request arrives."""
    from quire.bench.datasets import arrival_times, ramp_up_times

    if a.trace:
        return [request.arrival for request in requests]
    if a.ramp_up_strategy:
        ends = (a.ramp_up_start_rps, a.ramp_up_end_rps)
        return ramp_up_times(len(requests), a.ramp_up_strategy, *ends, a.burstiness, rng)
    rate = float("inf") if a.request_rate is None else a.request_rate
    return arrival_times(len(requests), rate, a.burstiness, rng)


def _rate(a: argparse.Namespace) -> str | float:
    """The request rate as the result names it."""
    if a.trace:
        return "trace"
    if a.ramp_up_strategy:
        return f"{a.ramp_up_start_rps:g}-{a.ramp_up_end_rps:g}"
    return "inf" if a.request_rate in (None, float("inf")) else float(a.request_rate)


def _load(a: argparse.Namespace) -> str:
    """The load for a person."""
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


def _requests(a: argparse.Namespace, prompts: "RandomPrompts") -> "list[BenchRequest]":
    from quire.bench import datasets

    if a.num_prompts is not None and a.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {a.num_prompts}")
    if a.trace or a.dataset_name == "custom":
        path = a.trace or a.dataset_path
        if path is None:
            raise ValueError("--dataset-name custom needs --dataset-path")
        return datasets.read_requests(path, prompts, a.output_len or a.custom_output_len, bool(a.trace))[
            : a.num_prompts
        ]
    count = a.num_prompts or 1000
    if a.dataset_name == "prefix_repetition":
        prefix_len, suffix_len = a.prefix_repetition_prefix_len, a.prefix_repetition_suffix_len
        output_len = a.output_len or a.prefix_repetition_output_len
        sizes = (a.prefix_repetition_num_prefixes, prefix_len, suffix_len, output_len)
        return datasets.prefix_repetition_requests(prompts, count, *sizes)
    lengths = (a.input_len or a.random_input_len, a.output_len or a.random_output_len)
    return datasets.random_requests(prompts, count, *lengths, a.random_range_ratio, a.random_prefix_len)
