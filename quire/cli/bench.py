"""`quire bench`: benchmarks. `throughput` and `latency` run the engine in this process, `serve` sends requests to a
server, `sweep` finds the options that suit a load, and `claims` compares measurements with the goals set for each
mechanism."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench import command as serve
from quire.bench.flags import add_command, add_vllm_flags, make_requests
from quire.cli.flags import add_engine_flags, add_log_level, engine_options
from quire.cli.model import add_model

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest
    from quire.engine.llm import LLM

HELP = "measure the engine, or any OpenAI-compatible server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, bench in _BENCHES.items():
        command = add_command(benches, name)
        if name == "serve":
            add_model(command, "the model's name on the server (default: the first model that the server lists)")
            add_vllm_flags(command)
        else:
            add_model(command)
            add_engine_flags(command)
        add_log_level(command, "WARNING")
        command.set_defaults(bench=bench, parser=command)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.bench(arguments))


def _throughput(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    options = engine_options(arguments)
    from quire.bench import offline
    from quire.engine.llm import LLM  # imports torch

    from_file = None if arguments.requests is None else offline.read_requests(arguments.requests)
    for_prefill = None if arguments.prefill_requests is None else offline.read_requests(arguments.prefill_requests)
    llm = LLM(arguments.model, **{"wait_for_kernels": True, **options})
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
    """Return the requests described by the flags. Raises ValueError for wrong flags."""
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
    if arguments.profile:
        options.setdefault("profiler_config", {"profiler": "torch", "torch_profiler_dir": "traces"})
    llm = LLM(arguments.model, **{"enable_prefix_caching": False, "wait_for_kernels": True, **options})
    offline.check_lengths(llm, *lengths)
    prompts = datasets.RandomPrompts(np.random.default_rng(llm.config.model.seed), llm.processor.vocab_size)
    batch = datasets.random_requests(prompts, batch_size, *lengths)
    requests = offline.with_params(batch, n=arguments.n, detokenize=not arguments.disable_detokenize)
    if arguments.profile:
        offline.profile(llm, requests, arguments.num_iters_warmup)
        llm.shutdown()
        folder = llm.config.profile.profiler_config.get("torch_profiler_dir")
        print(f"Profiled one batch of {batch_size} requests" + (f": the traces are in {folder}" if folder else ""))
        return 0
    measured = offline.latencies(llm, requests, arguments.num_iters_warmup, arguments.num_iters)
    llm.shutdown()
    record = offline.latency_record(measured)
    print(offline.latency_table(record, batch_size, *lengths))
    _write(arguments.output_json, record)
    return 0


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=4) + "\n", encoding="utf-8")


def _claims(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    from quire.bench import claims  # imports torch

    result = claims.measure(arguments.model, options, arguments.only or [], claims.Sizes(rounds=arguments.rounds))
    print(claims.table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    from quire.bench import sweep_command

    return sweep_command.run(arguments.model, options, arguments)


_BENCHES = {"throughput": _throughput, "latency": _latency, "serve": serve.run, "sweep": _sweep, "claims": _claims}
