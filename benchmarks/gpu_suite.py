"""Everything that only a GPU can tell, in one command of at most nine minutes, with no network and no weights:

    python benchmarks/gpu_suite.py [--only SECTION ...] [--out DIR]

First what must be right (every kernel against its reference, greedy text against transformers), then how fast it is,
as a share of what the device can do. Each section is a process of its own; one that fails or takes too long does not
stop the others. Prints a table, and writes gpu-suite.json and gpu-suite.png to --out, $OUT or benchmarks/results.

Needs torch, triton, numpy, safetensors, tokenizers, transformers, huggingface_hub, jinja2 and msgspec; a picture only
where there is matplotlib (`--draw gpu-suite.json` makes it later). `--small` does everything in small, on a CPU if need
be: for those who change this file.
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
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
DEADLINE = 535  # seconds for everything
SECTIONS = {  # and the seconds that each may take
    "machine": 60, "greedy": 100, "attention": 80, "0.6B": 110, "8B": 130, "transformers 0.6B": 90, "kernels": 90,
    "attention kernels": 120, "transformers 8B": 120,
}  # fmt: skip
FIRST = "machine"
# Of decoding: the step's copy, the graph and its input, tables, head, arg-max, tokens; one wait, for what was drawn.
MOST_A_STEP = {"launches_a_step": 20, "copies_a_step": 6, "waits_a_step": 1.1, "hidden_waits": 0}


# ---- a section, in its own process


def run_section(name: str, small: bool, limits: dict[str, Any]) -> dict[str, Any]:
    import gpu_checks
    import gpu_figures
    import torch

    if name not in SECTIONS:
        raise ValueError(f"there is no section {name!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        if name == FIRST:
            return {**_versions(torch, device), **gpu_figures.ceilings(device, small)}
        if name == "kernels":
            return _checked(gpu_checks.ops(device, not small))
        if name == "attention kernels":
            return _checked(gpu_checks.attention(device, not small))
        if name == "greedy":
            ways = {"graphs": {}, "eager": {"enforce_eager": True}, "one step at a time": {"async_scheduling": False}}
            ways["small chunks"] = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
            return _checked(
                (way, lambda options=options: gpu_checks.greedy(device.type, **options))  # type: ignore[misc]
                for way, options in ways.items()
            )
        if name == "attention":
            return gpu_figures.attention(device, limits, small)
        shape = "tiny" if small else "qwen3-0.6b" if name.endswith("0.6B") else "llama-3-8b"
        count, longest = (4, 40) if small else (256, 1024)
        if name.startswith("transformers"):
            return gpu_figures.transformers_batch(shape, count, longest, min(100, longest // 2))
        path = gpu_figures.write_shape(Path(folder) / shape, shape)
        return _engine(path, shape, device, limits, small, count, longest)


def _engine(
    path: Path, shape: str, device: Any, limits: dict[str, Any], small: bool, count: int, longest: int
) -> dict[str, Any]:
    """Start, one stream, many requests; what graphs gain."""
    import gpu_figures as figures

    options = {"max_model_len": 256 if small else 4096}
    llm, seconds = figures.start(path, device.type, **options)
    weights = figures.weight_bytes(figures.SHAPES[shape])
    made: dict[str, Any] = {"start_s": seconds, "kv_blocks": llm.core.executor.kv_cache.num_blocks}
    each = figures.one_stream(llm, 32 if small else 400)
    made |= {"one_stream_tok_s": 1 / each, "one_stream_share": weights / each / limits.get("read_bytes_s", math.nan)}
    tell(made)
    made |= {f"many_{key}": value for key, value in figures.many(llm, count, longest, min(100, longest // 2)).items()}
    tell(made)
    made |= figures.host(llm, 8 if small else 50)
    made["failures"] = {f"{key} = {made[key]}": f"more than {n}" for key, n in MOST_A_STEP.items() if made[key] > n}
    tell(made)
    llm.shutdown()
    if shape != "llama-3-8b":
        del llm
        gc.collect()  # its memory is the next one's
        eager, _ = figures.start(path, device.type, enforce_eager=True, kv_cache_memory_bytes=2**28 if small else 2**32,
                                 **options)  # fmt: skip
        made["graphs_gain"] = figures.one_stream(eager, 32 if small else 200) / each
    return made


def _checked(checks: Any) -> dict[str, Any]:
    passed, failures = [], {}
    for name, check in checks:
        try:
            check()
            passed.append(name)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"[:600]
            print(f"FAILED {name}\n{traceback.format_exc()[-3000:]}", file=sys.stderr, flush=True)
        tell({"passed": len(passed), "failures": failures})
    return {"passed": len(passed), "failures": failures}


def tell(made: dict[str, Any]) -> None:
    """What is known so far, should the rest fail or take too long."""
    print(json.dumps(made), flush=True)


def _versions(torch: Any, device: Any) -> dict[str, Any]:
    made = {"date": date.today().isoformat(), "python": platform.python_version(), "cpu": platform.processor()}
    made["c_compiler"] = shutil.which("gcc") or shutil.which("clang")  # Triton's launchers need one
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            made[package] = version(package)
        except PackageNotFoundError:
            made[package] = None
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return {**made, "device": torch.cuda.get_device_name(device), "memory_gib": round(total / 2**30, 1)}
    return {**made, "device": "cpu"}


# ---- all of them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "results"))
    parser.add_argument("--small", action="store_true", help="in small, for a trial without a GPU")
    parser.add_argument("--draw", type=Path, metavar="FILE.json", help="only draw the picture of an earlier run")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--limits", default="{}", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.section:
        tell(run_section(a.section, a.small, json.loads(a.limits)))
        return 0
    if a.draw:
        draw(json.loads(a.draw.read_text()), a.draw.with_suffix(".png"))
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    started = time.perf_counter()
    for name in SECTIONS:
        if name == FIRST or not a.only or name in a.only:
            left = DEADLINE - (time.perf_counter() - started)
            results[name] = _in_process(name, min(SECTIONS[name], left), a.small, results.get(FIRST, {}))
            (a.out / "gpu-suite.json").write_text(json.dumps(results, indent=1))  # what is there is there
    print(table(results))
    draw(results, a.out / "gpu-suite.png")
    return int(any(r.get("failures") or "error" in r for r in results.values()))


def _in_process(name: str, limit: float, small: bool, limits: dict[str, Any]) -> dict[str, Any]:
    if limit < 5:
        return {"error": "no time was left"}
    command = [sys.executable, __file__, "--section", name, "--limits", json.dumps(limits), *["--small"] * small]
    started = time.perf_counter()
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        return {**_last(out if isinstance(out, str) else out.decode()), "error": f"took more than {limit:.0f} s"}
    seconds = round(time.perf_counter() - started, 1)
    if done.returncode:
        return {**_last(done.stdout), "error": f"ended with {done.returncode}; see above", "section_s": seconds}
    return {**_last(done.stdout), "section_s": seconds}


def _last(text: str) -> dict[str, Any]:
    """The last whole line of JSON."""
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            made = json.loads(line)
            if isinstance(made, dict):
                return made
    return {}


# ---- what is shown


def _goals(results: dict[str, Any]) -> list[tuple[str, float | None, str, Callable[[float], bool]]]:
    """(what, figure, goal, whether it is met)"""

    def get(section: str, key: str) -> float | None:
        value = results.get(section, {}).get(key)
        return None if value is None else float(value)

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    prefill = get("attention", "prefill_flop_s")
    sizes = "0.6B", "8B"
    many = [ratio(get(n, "many_output_tok_s"), get(f"transformers {n}", "output_tok_s")) for n in sizes]
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


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["", *(f"{key}: {value}" for key, value in results.get(FIRST, {}).items()), ""]
    for name in ("kernels", "attention kernels", "greedy"):
        if name in results:
            r = results[name]
            failures = r.get("failures", {})
            lines.append(f"{name}: {r.get('passed', 0)} passed, {len(failures)} failed {r.get('error', '')}")
            lines += [f"    {what}: {why.splitlines()[0]}" for what, why in failures.items()]
    lines += ["", "| figure | measured | goal | |", "|---|---|---|---|"]
    for what, figure, goal, met in _goals(results):
        shown = ("-", "") if figure is None else (f"{figure:.3g}", "met" if met(figure) else "not met")
        lines.append(f"| {what} | {shown[0]} | {goal} | {shown[1]} |")
    for name in [n for n in SECTIONS if n not in ("kernels", "attention kernels", "greedy", FIRST) and n in results]:
        values = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in results[name].items())
        lines += ["", f"{name}: " + ", ".join(values)]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Each figure over its goal."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no matplotlib here; draw the picture with --draw {path.with_suffix('.json')}", file=sys.stderr)
        return
    shown = []
    for what, figure, goal, met in _goals(results):
        if figure:
            bound, at_least = float(goal.split()[1]), goal.startswith(">=")
            label = f"{what}\n{figure:.3g} (goal {goal})"
            shown.append((label, figure / bound if at_least else bound / figure, met(figure)))
    figure_ = Figure(figsize=(9, 0.7 + 0.55 * max(1, len(shown))), layout="constrained")
    axes = figure_.subplots()
    shown.reverse()
    axes.barh([s[0] for s in shown], [s[1] for s in shown], color=["#2563a8" if s[2] else "#e08a1e" for s in shown])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("how much of the goal is reached")
    axes.set_title(f"Quire on {results.get(FIRST, {}).get('device', '?')}, {results.get(FIRST, {}).get('date', '')}")
    axes.spines[["top", "right"]].set_visible(False)
    figure_.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
