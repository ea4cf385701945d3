"""`quire bench`: measure. `throughput` runs a file of requests through the engine, `serve` drives a server, `claims`
compares what was measured with what was promised."""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire._version import __version__
from quire.bench import command
from quire.cli.flags import add_engine_flags, add_log_level, engine_options

if TYPE_CHECKING:
    from quire.engine.llm import LLM

HELP = "measure the engine, or any server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    throughput = benches.add_parser(
        "throughput",
        help="tokens per second over a file of requests",
        description="Run a file of requests, all at once, and print tokens per second. The prompts alone (of "
        "--prefill-requests, or of the same file if left out) run first with one output token each: that is the "
        "prefill time.",
    )
    throughput.add_argument("model", nargs="?", help="directory or Hugging Face id; the bundled model if left out")
    throughput.add_argument(
        "--requests",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help='a request a line: {"prompt_token_ids": [...]} or {"prompt": "..."}, and any sampling parameters',
    )
    throughput.add_argument("--prefill-requests", type=Path, metavar="FILE.jsonl", help="prompts for the prefill time")
    throughput.add_argument("--json", action="store_true", help="print one line of JSON")
    add_log_level(throughput, "WARNING")
    add_engine_flags(throughput)
    throughput.set_defaults(bench=_throughput)
    serve = benches.add_parser("serve", help=command.HELP, description=command.DESCRIPTION)
    command.add_arguments(serve)
    add_log_level(serve, "WARNING")
    serve.set_defaults(bench=command.run)
    _add_claims(benches)


def run(arguments: argparse.Namespace) -> int:
    return int(arguments.bench(arguments))


def _throughput(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    requests = _read(arguments.requests)
    prefill_requests = _read(arguments.prefill_requests) if arguments.prefill_requests else requests
    from quire.engine.llm import LLM  # torch comes with it

    options = engine_options(arguments)
    llm = LLM(arguments.model, **options)
    startup_s = time.perf_counter() - started
    show = not arguments.json
    _timed(llm, [(llm.get_tokenizer().encode("warm up") or [0], {"max_tokens": 8, "ignore_eos": True})], False)
    llm.reset_prefix_cache()
    prefill_s, _ = _timed(llm, [(prompt, {**params, "max_tokens": 1}) for prompt, params in prefill_requests], show)
    if not arguments.prefill_requests:
        llm.reset_prefix_cache()  # the same prompts again
    total_s, outputs = _timed(llm, requests, show)
    tokens_in = sum(len(o.prompt_token_ids) for o in outputs)
    tokens_out = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    result: dict[str, Any] = {
        "engine": "quire",
        "version": __version__,
        "dtype": llm.dtype,
        "workload": arguments.requests.stem,
        "prefill_tok_s": round(tokens_in / prefill_s, 1),
        "decode_tok_s": round((tokens_out - len(outputs)) / max(total_s - prefill_s, 1e-9), 1),
        "output_tok_s": round(tokens_out / total_s, 1),
        "total_s": round(total_s, 2),
        "startup_s": round(startup_s, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "cached_tokens": sum(o.num_cached_tokens for o in outputs),
    }
    llm.shutdown()
    if arguments.json:
        print(json.dumps(result))
    else:
        width = max(map(len, result))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in result.items()))
    return 0


def _read(path: Path) -> list[tuple[Any, dict[str, Any]]]:
    """(prompt, sampling parameters) of each line. Raises ValueError naming the line that is wrong."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                fields = json.loads(line)
                prompt = fields.pop("prompt_token_ids", None) or fields.pop("prompt")
                if not isinstance(prompt, (str, list)):
                    raise TypeError(f"a prompt cannot be of type {type(prompt).__name__}")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f'{path}, line {number}: needs "prompt_token_ids" or "prompt" ({error})') from error
            requests.append((prompt, fields))
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return requests


def _timed(llm: "LLM", requests: list[tuple[Any, dict[str, Any]]], show_progress: bool) -> tuple[float, list[Any]]:
    """Seconds from the first request in to the last out, and the outputs."""
    from quire.messages.sampling_params import SamplingParams

    params = [SamplingParams(**fields) for _, fields in requests]
    started = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=show_progress and sys.stderr.isatty())
    return time.perf_counter() - started, outputs


# ---- claims


def _add_claims(benches: Any) -> None:
    claims = benches.add_parser(
        "claims",
        help="what the engine's mechanisms bring, against the goals set for them",
        description="Measure each mechanism with and without, in interleaved rounds, and print medians and goals.",
    )
    claims.add_argument("--model", help="directory or Hugging Face id; the bundled model if left out")
    claims.add_argument("--only", action="append", metavar="NAME", help="only claims whose name contains this")
    claims.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each measurement (default: 5)")
    claims.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    add_log_level(claims, "WARNING")
    add_engine_flags(claims)
    claims.set_defaults(bench=_claims)


def _claims(arguments: argparse.Namespace) -> int:
    from quire.bench import claims  # torch comes with it

    result = claims.measure(
        arguments.model, engine_options(arguments), arguments.only or [], claims.Sizes(rounds=arguments.rounds)
    )
    print(claims.table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
