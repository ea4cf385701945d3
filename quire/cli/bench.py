"""`quire bench`: benchmarks. `throughput` and `latency` run the engine in this process, `serve` sends requests to a
server, and `claims` compares measurements with the goals set for each mechanism."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench import command
from quire.bench.flags import add_flags, make_requests
from quire.cli.flags import add_engine_flags, add_log_level, engine_options
from quire.cli.model import add_model

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest
    from quire.engine.llm import LLM

HELP = "measure the engine, or any OpenAI-compatible server"

_THROUGHPUT = """Run all requests at once, and print requests and tokens per second. By default, prompts are random and
answers have exactly the requested length. With --requests, the prompts (or those of --prefill-requests) first run with
one output token each; the difference gives separate speeds of prefill and decoding."""
_LATENCY = """Run one batch of random prompts repeatedly, and print the time from the first request in to the last token
out. The prefix cache is reset before each iteration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    throughput = _add_offline(
        benches, "throughput", "requests and tokens per second, offline", _THROUGHPUT, "requests", "throughput"
    )
    throughput.set_defaults(bench=_throughput, parser=throughput)
    latency = _add_offline(benches, "latency", "time that one batch takes, offline", _LATENCY, "latency")
    latency.set_defaults(bench=_latency, parser=latency)
    serve = benches.add_parser("serve", help=command.HELP, description=command.DESCRIPTION)
    add_model(serve, "the model's name on the server (default: the first model that the server lists)")
    command.add_arguments(serve)
    add_log_level(serve, "WARNING")
    serve.set_defaults(bench=command.run, parser=serve)
    _add_claims(benches)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.bench(arguments))


def _add_offline(benches: Any, name: str, help: str, description: str, *flags: str) -> argparse.ArgumentParser:
    """Add a benchmark without a server. flags: the names of the tables with its own flags."""
    parser: argparse.ArgumentParser = benches.add_parser(name, help=help, description=description)
    add_model(parser)
    add_flags(parser, *flags, "offline")
    add_log_level(parser, "WARNING")
    add_engine_flags(parser)
    return parser


def _throughput(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    options = engine_options(arguments)
    from quire.bench import offline
    from quire.engine.llm import LLM  # imports torch

    from_file = None if arguments.requests is None else offline.read_requests(arguments.requests)
    for_prefill = None if arguments.prefill_requests is None else offline.read_requests(arguments.prefill_requests)
    llm = LLM(arguments.model, **options)
    startup = time.perf_counter() - started
    show_progress = not arguments.json
    prefill = None
    if from_file is None:
        generated = _requests(arguments, llm)
        requests = offline.with_params(generated, n=arguments.n, detokenize=not arguments.disable_detokenize)
    else:
        requests = from_file[: arguments.num_prompts]
    offline.warm_up(llm)
    if from_file is not None or for_prefill is not None:
        prompts = [(prompt, {**params, "max_tokens": 1}) for prompt, params in for_prefill or requests]
        prefill = offline.timed(llm, prompts, show_progress)
        llm.reset_prefix_cache()
    total = offline.timed(llm, requests, show_progress)
    record = {"workload": _workload(arguments), **offline.throughput_record(total, prefill, llm, startup)}
    llm.shutdown()
    print(json.dumps(record) if arguments.json else offline.throughput_table(record))
    _write(arguments.output_json, record)
    return 0


def _workload(arguments: argparse.Namespace) -> str:
    path = arguments.requests or arguments.dataset_path
    return str(arguments.dataset_name if path is None else path.stem)


def _requests(arguments: argparse.Namespace, llm: "LLM") -> "list[BenchRequest]":
    """The requests that the flags describe. Raises ValueError for wrong flags."""
    import numpy as np

    from quire.bench.datasets import RandomPrompts
    from quire.bench.offline import check_lengths

    prompts = RandomPrompts(np.random.default_rng(llm.config.model.seed), llm.processor.vocab_size)
    requests = make_requests(arguments, prompts)
    if arguments.dataset_name == "random":
        longest = max(requests, key=lambda request: request.prompt_len + request.output_len)
        check_lengths(llm, longest.prompt_len, longest.output_len)
    return requests


def _latency(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    import numpy as np

    from quire.bench import datasets, offline
    from quire.engine.llm import LLM  # imports torch

    batch_size = arguments.batch_size
    lengths = (arguments.input_len, arguments.output_len)
    llm = LLM(arguments.model, **{"enable_prefix_caching": False, **options})
    offline.check_lengths(llm, *lengths)
    prompts = datasets.RandomPrompts(np.random.default_rng(llm.config.model.seed), llm.processor.vocab_size)
    batch = datasets.random_requests(prompts, batch_size, *lengths)
    requests = offline.with_params(batch, n=arguments.n, detokenize=not arguments.disable_detokenize)
    measured = offline.latencies(llm, requests, arguments.num_iters_warmup, arguments.num_iters)
    llm.shutdown()
    record = offline.latency_record(measured)
    print(offline.latency_table(record, batch_size, *lengths))
    _write(arguments.output_json, record)
    return 0


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=4) + "\n", encoding="utf-8")


# ---- claims


def _add_claims(benches: Any) -> None:
    parser = benches.add_parser(
        "claims",
        help="gains of the engine's mechanisms, compared with their goals",
        description="Measure the engine with and without each mechanism, alternately, and print medians and goals.",
    )
    add_model(parser)
    parser.add_argument("--only", action="append", metavar="NAME", help="run only claims whose name contains this")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each measurement (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    add_log_level(parser, "WARNING")
    add_engine_flags(parser)
    parser.set_defaults(bench=_claims, parser=parser)


def _claims(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    from quire.bench import claims  # imports torch

    result = claims.measure(arguments.model, options, arguments.only or [], claims.Sizes(rounds=arguments.rounds))
    print(claims.table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
