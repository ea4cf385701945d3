"""Measures everything that needs a GPU. One command takes at most nine minutes, without network access or weights:

    python benchmarks/gpu_suite.py [--only SECTION ...] [--out DIR]

The sections are in the order of their value: first whether the engine is correct and how fast it is, then each kernel
against its reference, other tiles for the slowest kernels, two ranks, the sums of ranks if there are several GPUs, and
transformers for comparison. Each section runs in its own process. A section that fails or takes too long does not stop
the others. After each section, the results so far are written to gpu-suite.json in --out, $OUT or benchmarks/results.
With --only, the other sections keep their results. At the end, it writes a table and gpu-suite.png. docs/gpu.md
explains how to use them.

Needs torch, triton, numpy, safetensors, tokenizers, transformers, huggingface_hub, jinja2 and msgspec. The plot needs
matplotlib; `--draw gpu-suite.json` creates it later. To test changes of this file without a GPU: `--small` runs
everything at a small scale on a CPU, and `--stand-in sm_90` runs it with fewer tokens on a GPU that computes nothing
(benchmarks/gpu/tracing.py).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
DEADLINE = 535  # seconds for everything
FIRST = "machine"
SECTIONS = {  # and the seconds that each may take
    FIRST: 60, "greedy": 100, "attention": 80, "0.6B": 120, "8B": 140, "kernels": 90, "tiles": 90, "two ranks": 60,
    "sums of ranks": 40, "attention kernels": 120, "transformers 0.6B": 90, "transformers 8B": 120,
}  # fmt: skip
CHECKS = "greedy", "two ranks", "kernels", "attention kernels"
SHAPES = {"0.6B": "qwen3-0.6b", "8B": "llama-3-8b"}
# The maximum number in a decoding step: copies of the step's inputs, graphs, head and sampling, and a wait for the
# tokens.
LIMITS = {"launches_a_step": 20, "copies_a_step": 6, "waits_a_step": 1.1, "hidden_waits": 0}
Results = dict[str, dict[str, Any]]


# ---- a section, in its own process


def run_section(name: str, small: bool, few: bool, results: Results) -> dict[str, Any]:
    """few: fewer tokens and steps. results: of the previous sections."""
    import gpu_checks
    import gpu_figures
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ceilings = results.get(FIRST, {})
    if name == FIRST:
        return {**_versions(torch, device), **gpu_figures.ceilings(device, small)}
    if name == "kernels":
        return _checked(gpu_checks.ops(device, not small))
    if name == "attention kernels":
        return _checked(gpu_checks.attention(device, not small))
    if name == "greedy":
        variants: dict[str, dict[str, Any]] = {
            "graphs": {"require_cuda_graphs": True},
            "eager": {"enforce_eager": True},
            "one step at a time": {"async_scheduling": False},
            "small chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        }
        return _checked(
            (variant, lambda options=options: gpu_checks.greedy(device.type, **options))  # type: ignore[misc]
            for variant, options in variants.items()
        )
    if name == "two ranks":
        return _checked([("the text of one rank", lambda: gpu_checks.two_ranks(device.type))])
    if name == "sums of ranks":
        return _sums(torch.cuda.device_count() if device.type == "cuda" else 2, device.type)
    if name == "attention":
        return gpu_figures.attention(device, ceilings, small)
    if name == "tiles":
        return _tiles(device, results, small)
    if name not in SECTIONS:
        raise ValueError(f"there is no section {name!r}")
    count = 4 if small else 256
    longest = 40 if few else 1024
    shape = "tiny" if small else SHAPES[name.split()[-1]]
    if name.startswith("transformers"):
        return gpu_figures.transformers_batch(shape, 4 if few else count, longest, min(100, longest // 2))
    return _engine(shape, device, ceilings, small, few, count, longest)


def _engine(
    shape: str, device: Any, ceilings: dict[str, Any], small: bool, few: bool, count: int, longest: int
) -> dict[str, Any]:
    """Measure the start, one stream, the kernels of steps, many requests, and the gain from graphs."""
    import gpu_figures as figures

    from benchmarks.gpu.kernels import decoding_steps

    options = {"max_model_len": 256 if small else 4096}
    weights = figures.weight_bytes(figures.SHAPES[shape])
    with tempfile.TemporaryDirectory() as folder:
        path = figures.write_shape(Path(folder), shape)
        llm, seconds = figures.start(path, device.type, **options)
        result: dict[str, Any] = {"start_s": seconds, "kv_blocks": llm.core.executor.kv_cache.num_blocks}
        if device.type == "cuda":
            result["graphs"] = llm.core.executor.runner.forward.num_graphs
        tell(result)
        each = figures.one_stream(llm, 32 if few else 400)
        read_rate = ceilings.get("read_bytes_s", math.nan)
        result |= {"one_stream_tok_s": 1 / each, "one_stream_share": weights / each / read_rate}
        tell(result)
        result |= figures.host(llm, 8 if few else 50)
        result["failures"] = {
            f"{key} = {result[key]}": f"more than {limit}" for key, limit in LIMITS.items() if result[key] > limit
        }
        if result.get("graphs") == 0:
            result["failures"]["graphs"] = "no CUDA graph was captured; see the log"
        kernels = result["kernels"] = {}
        for requests, context, case in ((1, 320, "one stream"), (256, 576, "256 requests")):
            requests, context = (min(requests, 4), 40) if small else (requests, context)
            kernels[f"{shape}, {case}"] = decoding_steps(llm, requests, context, 8)
            tell(result)
        many = figures.many(llm, count, longest, min(100, longest // 2))
        result |= {f"many_{key}": value for key, value in many.items()}
        tell(result)
        llm.shutdown()
        if shape != "llama-3-8b":
            del llm
            gc.collect()  # frees its memory for the next engine
            eager, _ = figures.start(
                path, device.type, enforce_eager=True, kv_cache_memory_bytes=2**28 if small else 2**32, **options
            )
            result["graphs_gain"] = figures.one_stream(eager, 32 if few else 200) / each
    return result


def _sums(ranks: int, kind: str) -> dict[str, Any]:
    """Return the microseconds of an all-reduce with Quire's implementation and with torch's, by the size of the
    tensor."""
    from statistics import median

    from benchmarks.sums_of_ranks import measure

    if ranks < 2:
        return {"skipped": "there is one GPU"}
    return {f"{name} bytes, us": 1e6 * median(times) for name, times in measure(ranks, 3, kind).items()}


def _tiles(device: Any, results: Results, small: bool) -> dict[str, Any]:
    """Try other tiles for the three Triton kernels that lose the most time relative to the expectation."""
    import gpu_figures as figures

    from benchmarks.gpu import kernels

    if device.type != "cuda":
        return {"tried": {}}
    worst = [d for d in _differences(results) if d.kernel not in (kernels.PRODUCTS, kernels.OTHERS)][:3]
    if not worst:  # no expected times for this card: take the slowest kernels
        measured = [(figure, k) for figure, found in _measured(results).items() for k in found]
        named = [(f, k) for f, k in measured if k["name"] not in (kernels.PRODUCTS, kernels.OTHERS)]
        named.sort(key=lambda pair: -pair[1]["seconds"])
        worst = [kernels.Difference(f, k["name"], k["seconds"], math.nan) for f, k in named[:3]]
    clock = figures.Clock(device, is_cold=True)
    tried = {}
    for figure in dict.fromkeys(difference.figure for difference in worst):
        launches: dict[str, kernels.Launch] = {}
        with kernels.recorded(launches):
            figures.run_figure(figure, device, small)
        for difference in worst:
            if difference.figure == figure and difference.kernel in launches:
                launch = launches[difference.kernel]
                result = tried[f"{figure}: {difference.kernel}"] = kernels.try_tiles(launch, clock)
                tell({"tried": tried})
                if difference.kernel == "attend_kernel" and "attention" in figure:
                    run = partial(figures.run_figure, figure, device, small)
                    kernels.try_rows(result, launch.arguments["ROWS"], run, clock)
                    tell({"tried": tried})
        launches.clear()
        gc.collect()
    return {"tried": tried}


def _checked(checks: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, Any]:
    passed = []
    failures = {}
    for name, check in checks:
        try:
            check()
            passed.append(name)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"[:600]
            print(f"FAILED {name}\n{traceback.format_exc()[-3000:]}", file=sys.stderr, flush=True)
        tell({"passed": len(passed), "failures": failures})
    return {"passed": len(passed), "failures": failures}


def tell(result: dict[str, Any]) -> None:
    """Print the result so far, which is kept if the rest of the section fails or takes too long."""
    print(json.dumps(result), flush=True)


def _versions(torch: Any, device: Any) -> dict[str, Any]:
    result = {"date": date.today().isoformat(), "python": platform.python_version(), "cpu": platform.processor()}
    result["c_compiler"] = shutil.which("gcc") or shutil.which("clang")  # Triton's launchers need a C compiler
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = None
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return {**result, "device": torch.cuda.get_device_name(device), "memory_gib": round(total / 2**30, 1)}
    return {**result, "device": "cpu"}


# ---- all sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    parser.add_argument("--small", action="store_true", help="in small, for a trial without a GPU")
    parser.add_argument("--stand-in", metavar="TARGET", help="run on a stand-in for a card, sm_90 for example")
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="only draw the picture of an earlier run")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    a = parser.parse_args()
    saved = a.out / "gpu-suite.json"
    if a.section:
        results = json.loads(saved.read_text()) if saved.exists() else {}
        with _stand_in(a.stand_in):
            tell(run_section(a.section, a.small, a.small or a.stand_in is not None, results))
        return 0
    if a.draw:
        draw(json.loads(a.draw.read_text()), a.draw.with_suffix(".png"))
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    if not a.only:
        saved.unlink(missing_ok=True)
    options = ["--out", str(a.out), *["--small"] * a.small, *(["--stand-in", a.stand_in] if a.stand_in else [])]
    slowness = 10 if a.stand_in else 1  # kernels are compiled on CPUs, and steps are as slow as on a CPU
    results: Results = json.loads(saved.read_text()) if saved.exists() else {}
    started = time.perf_counter()
    for name in SECTIONS:
        if (name == FIRST and name not in results) or not a.only or name in a.only:
            left = slowness * DEADLINE - (time.perf_counter() - started)
            results[name] = run_process(name, min(slowness * SECTIONS[name], left), options)
            saved.write_text(json.dumps(results, indent=1))
    print(table(results))
    draw(results, a.out / "gpu-suite.png")
    return int(any(r.get("failures") or "error" in r for r in results.values()))


@contextlib.contextmanager
def _stand_in(target: str | None) -> Any:
    """Run on a simulated card, if one is named. The ranks' processes get one, too."""
    if target is None:
        yield
        return
    import warnings
    from unittest import mock

    from benchmarks.gpu.profiler import stand_in_profiler
    from benchmarks.gpu.tracing import stand_in
    from quire.platform.gpu.cards import CARDS

    warnings.simplefilter("ignore")
    with stand_in(CARDS[target]) as device, stand_in_profiler(device):
        from quire.executor import local_ranks

        program = (str(HERE / "gpu" / "rank_on_stand_in.py"), target, "1")
        with mock.patch.object(local_ranks, "RANK_PROGRAM", program):
            yield


def run_process(name: str, limit: float, options: list[str]) -> dict[str, Any]:
    """Return the result that a section reached within `limit` seconds."""
    if limit < 5:
        return {"error": "no time was left"}
    started = time.perf_counter()
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        command = [sys.executable, __file__, "--section", name, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output if isinstance(output, str) else output.decode()
        return {**last_result(text), "error": f"took more than {limit:.0f} s"}
    result = {**last_result(done.stdout), "section_s": round(time.perf_counter() - started, 1)}
    if done.returncode:
        result["error"] = f"ended with exit code {done.returncode}; see above"
    return result


def last_result(text: str) -> dict[str, Any]:
    """Return the last complete line of JSON that is an object."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            if isinstance(result, dict):
                return result
    return {}


# ---- the report


def _measured(results: Results) -> dict[str, list[dict[str, Any]]]:
    return {figure: found for r in results.values() for figure, found in r.get("kernels", {}).items()}


def _differences(results: Results) -> list[Any]:
    from benchmarks.gpu import kernels

    return kernels.differences(_measured(results), kernels.expected(results.get(FIRST, {}).get("device", "")))


def _goals(results: Results) -> list[tuple[str, float | None, str, Callable[[float], bool]]]:
    """(name, figure, goal, whether the goal is met)"""

    def get(section: str, key: str) -> float | None:
        value = results.get(section, {}).get(key)
        return None if value is None else float(value)

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    prefill = get("attention", "prefill_flop_s")
    many = [ratio(get(n, "many_output_tok_s"), get(f"transformers {n}", "output_tok_s")) for n in SHAPES]
    return [
        ("decode attention, share of the read rate", get("attention", "decode_share"), ">= 0.85", lambda x: x >= 0.85),
        ("prefill attention, TFLOP/s", prefill and prefill / 1e12, ">= 400", lambda x: x >= 400),
        ("8B, one stream, share of the read rate", get("8B", "one_stream_share"), ">= 0.75", lambda x: x >= 0.75),
        ("0.6B, one stream, tok/s", get("0.6B", "one_stream_tok_s"), ">= 700", lambda x: x >= 700),
        ("0.6B, 256 requests, x generate_batch", many[0], ">= 3", lambda x: x >= 3),
        ("8B, 256 requests, x generate_batch", many[1], ">= 3", lambda x: x >= 3),
        ("0.6B, device idle between steps", get("0.6B", "idle_share"), "<= 0.03", lambda x: x <= 0.03),
        ("8B, device idle between steps", get("8B", "idle_share"), "<= 0.03", lambda x: x <= 0.03),
        ("0.6B, CUDA graphs on / off", get("0.6B", "graphs_gain"), ">= 1.7", lambda x: x >= 1.7),
        ("8B, start, s", get("8B", "start_s"), "<= 15", lambda x: x <= 15),
    ]


def table(results: Results) -> str:
    """Return the results as Markdown."""
    lines = ["", *(f"{key}: {value}" for key, value in results.get(FIRST, {}).items()), ""]
    for name in CHECKS:
        if name in results:
            r = results[name]
            failures = r.get("failures", {})
            lines.append(f"{name}: {r.get('passed', 0)} passed, {len(failures)} failed {r.get('error', '')}")
            lines += [f"    {check}: {reason.splitlines()[0]}" for check, reason in failures.items()]
    lines += ["", "| figure | measured | goal | |", "|---|---|---|---|"]
    for name, figure, goal, is_met in _goals(results):
        shown = ("-", "") if figure is None else (f"{figure:.3g}", "met" if is_met(figure) else "not met")
        lines.append(f"| {name} | {shown[0]} | {goal} | {shown[1]} |")
    lines += _kernel_tables(results)
    for name in [n for n in SECTIONS if n not in (*CHECKS, FIRST, "tiles") and n in results]:
        values = {k: v for k, v in results[name].items() if k != "kernels"}
        shown_values = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        lines += ["", f"{name}: " + ", ".join(shown_values)]
    return "\n".join(lines)


def _kernel_tables(results: Results) -> list[str]:
    """Return tables of all kernels with expected times, the three that lose the most time, and their best tiles."""
    lines = []
    found = _differences(results)
    expected = {(d.figure, d.kernel): d.expected for d in found}
    for figure, kernels in _measured(results).items():
        lines += ["", f"| {figure}: kernel | launches | us a step | expected us | x |", "|---|---|---|---|---|"]
        for k in kernels:
            wanted = expected.get((figure, k["name"]))
            beside = ("-", "-") if not wanted else (f"{1e6 * wanted:.1f}", f"{k['seconds'] / wanted:.2f}")
            lines.append(f"| {k['name']} | {k['launches']:.3g} | {1e6 * k['seconds']:.1f} | {' | '.join(beside)} |")
    if found:
        lines += ["", "The three kernels that lose most time against the expectation:"]
        lines += [f"    {d.figure}: {d.kernel} loses {1e6 * d.lost:.1f} us a step" for d in found[:3]]
    for name, tried in results.get("tiles", {}).get("tried", {}).items():
        lines.append(f"    tiles of {name}: {tried['own_us']:.1f} us; best {tried['best']}: {tried['best_us']:.1f} us")
    return lines


def draw(results: Results, path: Path) -> None:
    """Draw each figure as a share of its goal."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"matplotlib is missing; draw the picture with --draw {path.with_suffix('.json')}", file=sys.stderr)
        return
    bars = []
    for name, figure, goal, is_met in _goals(results):
        if figure:
            bound = float(goal.split()[1])
            at_least = goal.startswith(">=")
            label = f"{name}\n{figure:.3g} (goal {goal})"
            bars.append((label, figure / bound if at_least else bound / figure, is_met(figure)))
    picture = Figure(figsize=(9, 0.7 + 0.55 * max(1, len(bars))), layout="constrained")
    axes = picture.subplots()
    bars.reverse()
    axes.barh([b[0] for b in bars], [b[1] for b in bars], color=["#2563a8" if b[2] else "#e08a1e" for b in bars])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("share of the goal")
    axes.set_title(f"Quire on {results.get(FIRST, {}).get('device', '?')}, {results.get(FIRST, {}).get('date', '')}")
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
