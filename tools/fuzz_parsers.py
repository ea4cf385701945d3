"""Fuzzes the parsers of untrusted bytes with atheris, guided by the coverage of their Python code.

    pip install -e ".[test]" "atheris>=3,<4"
    python tools/fuzz_parsers.py gguf --seconds 120
    python tools/fuzz_parsers.py all --seconds 3600 --corpus ~/fuzzed

The targets are in tests/support/fuzz_targets.py. A run starts with the target's seeds, the inputs in
tests/fuzz/corpus/TARGET, and those found by earlier runs with the same --corpus. It stops at the first bug, and saves
its input in tests/fuzz/corpus/TARGET, where tests/fuzz replays it without atheris. The final table has the executions
per second and the number of edges reached in the instrumented code. The exit status is 1 if there was a bug.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
CORPUS = TESTS / "fuzz" / "corpus"
NAMES = "gguf safetensors tokenizer adapter kv_frames multipart".split()
SLOWEST = 10  # seconds for one input, after which it counts as a hang


def fuzz(name: str, libfuzzer: list[str]) -> None:
    """Fuzz one target. Runs in a separate process, which exits with libFuzzer's status."""
    import atheris

    sys.path.insert(0, str(TESTS))
    sys.path.append(str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    modules = (
        "quire.checkpoints quire.text quire.lora quire.transfer quire.server starlette python_multipart json".split()
    )
    with atheris.instrument_imports(include=modules, enable_loader_override=False):
        from support.fuzz_targets import MEMORY_BYTES, TARGETS

    target = TARGETS[name]
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + 2 * MEMORY_BYTES, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder, "seeds")
        seeds.mkdir()
        for number, seed in enumerate(target.seeds()):
            (seeds / f"seed-{number}").write_bytes(seed)
        words = Path(folder, "words")
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        if target.words:
            libfuzzer.append(f"-dict={words}")
        libfuzzer += [f"-max_len={target.max_bytes}", str(seeds)]

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            draw = random.Random(seed)
            if draw.random() < 0.4:
                return bytes(atheris.Mutate(data, max_size))
            return target.mutate(bytes(data), draw)[:max_size]

        atheris.Setup([sys.argv[0], *libfuzzer], target.run, custom_mutator=mutate)
        atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def run(name: str, seconds: int, kept: Path | None) -> tuple[str, bool]:
    """Fuzz a target in a subprocess. Returns a line of the table, and whether there was a bug."""
    saved = CORPUS / name
    with tempfile.TemporaryDirectory() as folder:
        found = kept / name if kept else Path(folder, "found")
        found.mkdir(parents=True, exist_ok=True)
        bugs = Path(folder, "bugs")
        bugs.mkdir()
        options = [
            f"-max_total_time={seconds}",
            f"-timeout={SLOWEST}",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={bugs}/",
            "-reload=0",
            str(found),
        ]
        if saved.is_dir():
            options.append(str(saved))
        command = [sys.executable, __file__, name, "--libfuzzer", *options]
        process = subprocess.Popen(
            command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, errors="replace"
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not line.startswith(("INFO: Instrumenting", "stat::", "###### ")) and "\tNEW " not in line:
                print(line, end="", flush=True)
        status = process.wait()
        is_bug = status != 0
        for bug in bugs.iterdir():
            data = bug.read_bytes()
            saved.mkdir(parents=True, exist_ok=True)
            place = saved / f"{bug.name.partition('-')[0]}-{hashlib.sha256(data).hexdigest()[:12]}"
            place.write_bytes(data)
            print(f"The input of the bug is {place.relative_to(ROOT)}, and tests/fuzz fails until it is fixed.")
    log = "".join(lines)
    rate, executions = (
        _last(rf"stat::{stat}:\s+(\d+)", log) for stat in ("average_exec_per_sec", "number_of_executed_units")
    )
    coverage = _last(r"cov: (\d+)", log)
    outcome = "bug" if is_bug else "ok"
    return f"{name:12} {executions:>12} {rate:>12} {coverage:>9}  {outcome}", is_bug


def _last(pattern: str, log: str) -> str:
    found = re.findall(pattern, log)
    return found[-1] if found else "?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*NAMES, "all"])
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, help="a folder in which inputs that reach new code are kept")
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.libfuzzer is not None:
        fuzz(arguments.target, arguments.libfuzzer)
        return 0
    names = NAMES if arguments.target == "all" else [arguments.target]
    results = [run(name, arguments.seconds, arguments.corpus) for name in names]
    print(f"\n{'target':12} {'executions':>12} {'per second':>12} {'coverage':>9}")
    print(*(line for line, _ in results), sep="\n")
    return int(any(is_bug for _, is_bug in results))


if __name__ == "__main__":
    sys.exit(main())
