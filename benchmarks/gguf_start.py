"""Measures the time to a GGUF file's first token: at the first start, with an empty weight cache, and at later ones.

    python benchmarks/gguf_start.py FILE... [--rounds 5] [--peer PYTHON]

Each start is a separate process. Wall time is the time that a user waits; processor time is more reliable on a busy
machine. The CPU kernels are compiled beforehand, and the file is in the system's cache. First starts do not write the
weight cache, since that would continue after the first token. peer: an interpreter with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire.ops.cpu.build import library
from quire.platform.folders import cache_folder

_PEER = """
import sys
from llama_cpp import Llama
Llama(sys.argv[1], n_ctx=512, verbose=False)("Once upon a time", max_tokens=1)
"""
_IMPORT = "from quire.platform.torch_import import quick_imports\nwith quick_imports():\n    import torch"


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and processor seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def print_row(name: str, command: list[str], environment: dict[str, str], rounds: int) -> None:
    walls, processors = zip(*(timed(command, environment) for _ in range(rounds)), strict=True)
    figures = (statistics.median(walls), min(walls), statistics.median(processors), min(processors))
    print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer")
    arguments = parser.parse_args()
    folder = cache_folder()
    if library() is None or folder is None:
        sys.exit("the CPU kernels cannot be compiled here")
    print("| start | wall, median | least | processor, median | least |\n|---|---|---|---|---|")
    rounds = arguments.rounds
    print_row("import of torch alone", [sys.executable, "-c", _IMPORT], {**os.environ}, rounds)
    for file in arguments.files:
        program = [sys.executable, "-m", "quire", "generate", "Once upon a time"]
        command = [*program, "--model", str(file), "--max-tokens", "1"]
        file.read_bytes()
        with tempfile.TemporaryDirectory() as cache:
            Path(cache, "quire").mkdir()
            Path(cache, "quire", "kernels").symlink_to(folder / "kernels")
            environment = {**os.environ, "XDG_CACHE_HOME": cache}
            print_row(f"{file.name}, first", [*command, "--no-weight-cache"], environment, rounds)
            timed(command, environment)  # fills the weight cache
            print_row(f"{file.name}, later", command, environment, rounds)
        if arguments.peer:
            print_row(f"{file.name}, llama.cpp", [arguments.peer, "-c", _PEER, str(file)], {**os.environ}, rounds)


if __name__ == "__main__":
    main()
