"""Compares Quire, llama.cpp and ik_llama.cpp on the same GGUF files, in interleaved rounds.

    python benchmarks/side_by_side_gguf.py --gguf qwen=FILE gemma=FILE --out DIR --peer llamacpp=PYTHON --peer ik=PYTHON

Runs, rounds and runs.jsonl are those of side_by_side.py, which compares float checkpoints with synthetic weights; here
every engine reads the same real file. On a processor with AVX-512, --cpu-isa avx2 emulates one with only AVX2, if the
peers were built accordingly: the report lists their instruction sets. A start is the time from the start of a process
to its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import date
from math import inf, nan
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import side_by_side
import side_by_side_report as report
from side_by_side_report import NAMES, Medians, Record, Run

HERE = Path(__file__).resolve().parent
ENGINES = ("quire", "llamacpp", "ik")
METRICS = {  # workload: (label, metric, whether less is better)
    "prompt": ("prompt of 512, tokens read a second", "prefill_tok_s", False),
    "single": ("one stream, decoding", "decode_tok_s", False),
    "batch": ("16 streams, output", "output_tok_s", False),
    "start": ("seconds to the first token", "first_answer_s", True),
}


class GgufBench(side_by_side.Bench):
    """The runs of several files, whose names replace the data types of side_by_side.py."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a = arguments
        self.logs = arguments.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def schedule(self) -> Iterator[tuple[int, Run]]:
        """Every other round runs the engines in reverse order. Round 0 fills the file and kernel caches."""
        engines = [engine for engine in ENGINES if engine == "quire" or engine in self.a.peer]
        for name in self.a.gguf:
            for engine in engines:
                yield 0, Run(engine, name, "start")
        for number in range(1, self.a.rounds + 1):
            for name in self.a.gguf:
                for workload in self.a.workloads:
                    for engine in engines if number % 2 else reversed(engines):
                        yield number, Run(engine, name, workload)

    def _command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        a = self.a
        path = str(self.a.gguf[run.dtype])
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(a.threads)}
        if run.engine in a.peer:
            del environment["OMP_NUM_THREADS"]
            script = HERE / "peers" / side_by_side.GGUF_PEERS[run.engine]
            return [a.peer[run.engine], str(script), path, run.workload, str(a.threads)], environment
        flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(a.kv_cache_bytes), "--cpu-isa", a.cpu_isa]
        flags += a.quire_args.split()
        if run.workload == "start":
            answer = ["--max-tokens", "1", "--ignore-eos", "--temperature", "0"]
            command = [a.quire, "-m", "quire", "generate", side_by_side.PROMPT, "--model", path]
            return [*command, *answer, *flags], environment
        script = HERE / "peers" / "bench_quire.py"
        return [a.quire, str(script), path, run.workload, "--kv-cache-pretouch", *flags], environment


def table(measured: Medians, names: list[str]) -> str:
    """Medians of every engine, and Quire's relative to the best other engine."""
    lines = ["| | Quire | llama.cpp | ik_llama.cpp | Quire ÷ the best other |", "|---|---|---|---|---|"]
    for name in names:
        for workload, (label, metric, less_is_better) in METRICS.items():
            values = [measured.get(Run(engine, name, workload), {}).get(metric, nan) for engine in ENGINES]
            if all(value != value for value in values):
                continue
            ours, *others = values
            known = [value for value in others if value == value]
            ratio = nan
            if known:
                ratio = min(known) / ours if less_is_better else ours / max(known)
            digits = 2 if less_is_better else 1
            cells = ["–" if value != value else f"{value:,.{digits}f}" for value in values]
            lines.append(f"| {name}: {label} | {' | '.join(cells)} | {'–' if ratio != ratio else f'{ratio:.2f}'} |")
    return "\n".join(lines) + "\n"


def write_report(a: argparse.Namespace, records: list[Record], settings: dict[str, Any]) -> str:
    measured = report.medians(records)
    known = {r["engine"]: r["result"]["version"] for r in records if "version" in r.get("result", {})}
    versions = [f"{NAMES[engine]} {known[engine]}" for engine in ENGINES if engine in known]
    rounds = max(record["round"] for record in records)
    head = f"{a.threads} cores of {settings['machine']}, {date.today()}: medians of {rounds} interleaved rounds. "
    head += f"{', '.join(versions)}; Quire's instruction set: {a.cpu_isa}; its source: {settings['source']}."
    if others := [record["result"]["others_cpu"] for record in records if "result" in record]:
        head += f"\nOther processes had {median(others):.1%} of the processors, {max(others):.1%} at most in one run."
    joules = {str(run): of["joules_per_token"] for run, of in measured.items() if "joules_per_token" in of}
    head += "\nEnergy: this machine has no RAPL counters that can be read." if not joules else ""
    for name, value in joules.items():
        head += f"\n{name}: {value:.2f} J a token of output"
    for record in records:
        if "error" in record:
            head += f"\nFailed in round {record['round']}: {report.run_of(record)}: {record['error'].splitlines()[0]}"
    text = f"{head}\n\n{table(measured, list(a.gguf))}"
    (a.out / "side_by_side_gguf.md").write_text(text)
    return text


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=...")
    return name, value


def _peer(text: str) -> tuple[str, str]:
    name, value = _named(text)
    if name not in ENGINES[1:]:
        raise argparse.ArgumentTypeError(f"{name!r}: there are {', '.join(ENGINES[1:])}")
    return name, value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gguf", type=_named, nargs="+", required=True, metavar="NAME=FILE", help="the models")
    add("--out", type=Path, required=True, metavar="DIR", help="where runs and the table go")
    add("--peer", type=_peer, action="append", default=[], metavar="NAME=PYTHON", help=", ".join(ENGINES[1:]))
    add("--quire", default=sys.executable, metavar="PYTHON", help="the interpreter that has Quire (default: this one)")
    add("--workloads", nargs="+", choices=METRICS, default=list(METRICS), help="(default: all)")
    add("--rounds", type=int, default=3, metavar="N", help="that count (default: 3)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of every engine (default: all cores)")
    add("--kv-cache-bytes", type=int, default=1 << 29, metavar="N", help="Quire's KV cache (default: 512 MiB)")
    add("--cpu-isa", default="native", metavar="NAME", help="instruction set of Quire's kernels")
    add("--timeout", type=float, default=600, metavar="S", help="of one run (default: 600)")
    add("--quire-args", default="", metavar="FLAGS", help="more flags for Quire, in one word")
    arguments = parser.parse_args(argv)
    arguments.peer = dict(arguments.peer)
    arguments.gguf = {name: Path(path) for name, path in arguments.gguf}
    arguments.contenders = inf
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a run failed. Raises ValueError for an --out that does not fit."""
    a = parse(argv)
    bench = GgufBench(a)
    side_by_side._adopt_orphans()
    settings = {name: getattr(a, name) for name in ("threads", "kv_cache_bytes", "cpu_isa", "quire_args")}
    settings |= {"source": side_by_side._source(), "machine": side_by_side._machine()}
    settings["gguf"] = {name: [str(path), path.stat().st_size] for name, path in a.gguf.items()}
    records = side_by_side.run_all(bench, json.loads(json.dumps(settings)))
    print(write_report(a, records, settings))
    return 1 if any("error" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
