"""Measures what tests detect: changes a package's code in one place (a mutant), and runs the package's tests on it.

    pip install -e ".[test]" "cosmic-ray>=8.4,<9"
    python tools/mutants.py --seed 45 --per-package 40 --out mutants.jsonl
    python tools/mutants.py --mutants mutants.jsonl --tests ../older --out again.jsonl  # the same mutants, other tests
    python tools/mutants.py --only-survivors-of mutants.jsonl -m "not nightly" --out survivors.jsonl

cosmic-ray's operators generate the mutants. The seed selects places in the code, and one mutation for each. A mutant
counts as killed if a test fails, hangs, or takes too much processor time or memory. --out gets a line of JSON for each
mutant as soon as its tests have finished, and a second run with the same --out continues the first. The final table
counts the mutants. `--table FILE...` only prints it, for earlier results; a mutant in several files counts as killed if
it was killed in any of them.

Each mutant runs in its own process, forked from one that has already imported the tests' dependencies from other
packages. The checkouts are first copied to a temporary folder, so they may change during the run.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import difflib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
CODE = "quire*"  # folders with the code; everything else in a checkout belongs to the tests
NOT_COPIED = (".git", ".ci", ".hypothesis", "__pycache__", "*_cache", ".venv", "models", "build", "dist", "*.egg-info")


@dataclass(frozen=True)
class Package:
    """Globs of files. The cheapest and most specific tests run first, since the first failure ends a run."""

    sources: str
    tests: str


PACKAGES = {
    "scheduler": Package(
        "quire/scheduler/*.py",
        "tests/scheduler/test_scheduler.py tests/scheduler/test_[!s]*.py tests/scheduler/test_*.py",
    ),
    "kvcache": Package(
        "quire/kv/*.py",
        "tests/kv/test_*.py tests/scheduler/test_s*r.py tests/engine/test_tiers.py tests/scheduler/test_*.py",
    ),
    "sampling": Package("quire/sampling/*.py", "tests/sampling/test_*.py tests/engine/test_sampling_features.py"),
    "parsing": Package(
        "quire/parsing/*.py", "tests/parsing/test_[!a]*.py tests/parsing/test_answer.py tests/parsing/test_*.py"
    ),
    "protocol": Package(
        "quire/server/protocol.py quire/server/fields.py quire/server/messages.py quire/server/bodies.py",
        """tests/server/test_vllm_fields.py tests/server/test_malformed.py tests/server/test_completions.py
        tests/server/test_chat.py tests/server/test_structured_answers.py tests/server/test_large_bodies.py
        tests/server/test_usage.py""",
    ),
    "lora": Package("quire/lora/*.py quire/layers/lora.py", "tests/lora/test_*.py"),
}

COMPARISONS = "Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
ARITHMETIC = """Add_Sub Sub_Add Mul_FloorDiv Mul_Add Div_Mul FloorDiv_Mul FloorDiv_Mod Mod_FloorDiv Mod_Add Pow_Mul
    RShift_LShift LShift_RShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr"""
OPERATORS = [  # cosmic-ray's, except decorators and replacements that hardly any program survives
    "NumberReplacer",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "ZeroIterationForLoop",
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    *(f"ReplaceComparisonOperator_{names}" for names in COMPARISONS.split()),
    *(f"ReplaceBinaryOperator_{names}" for names in ARITHMETIC.split()),
]

# A mutant's limit of processor time: a multiple of the time of the unmutated tests, but at least some seconds.
TIMES_THE_COST = 5
LEAST_LIMIT = 30.0
# It hangs if it uses less processor time than LEAST_PROGRESS within PATIENCE, both in seconds.
PATIENCE = 60.0
LEAST_PROGRESS = 2.0
MEMORY_LIMIT = 8 << 30  # bytes, of all processes of a mutant
EXCERPT = 160  # characters of a changed line


@dataclass
class Mutant:
    package: str
    file: str
    line: int
    operator: str
    occurrence: int
    diff: str
    outcome: str = ""  # killed, timeout or survived; "gone" if this code has no such mutant
    test: str = ""  # the first one that failed
    seconds: float = 0.0  # of processor time

    @property
    def key(self) -> tuple[str, str, int]:
        return self.file, self.operator, self.occurrence


# ---- the mutants


def mutants_of(package: str, tree: Path) -> list[list[Mutant]]:
    """Return the possible mutants for each place in a package's code."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    operators = {name: get_operator(f"core/{name}")() for name in OPERATORS}
    places: dict[tuple[Any, ...], list[Mutant]] = defaultdict(list)
    for path in _files(package, tree):
        file = path.relative_to(tree).as_posix()
        source = path.read_text()
        skipped = list(_skipped(source))
        occurrences = Counter[str]()
        for node in ast_nodes(get_ast(source)):
            for name, operator in operators.items():
                for start, _ in operator.mutation_positions(node):
                    mutant = Mutant(package, file, start[0], name, occurrences[name], "")
                    occurrences[name] += 1
                    if not any(first <= start < last for first, last in skipped):
                        places[file, start, name.partition("_")[0]].append(mutant)
    return list(places.values())


def _files(package: str, tree: Path) -> list[Path]:
    return sorted(path for pattern in PACKAGES[package].sources.split() for path in tree.glob(pattern))


def _skipped(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Return (start, end) of annotations, decorators and class options, where a change affects nothing or
    everything."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        if isinstance(node, ast.ClassDef):
            parts += [keyword.value for keyword in node.keywords]  # frozen=True
        for part in parts:
            # `x: Annotated[int, Field(ge=0)]` contains a bound, which is mutated.
            if part is not None and "Field(" not in ast.unparse(part):
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def mutate(source: str, mutant: Mutant) -> str | None:
    """Return the mutant's source, or None if it is not valid Python or is the same program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    mutated = mutate_code(source, get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    try:
        same = mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return None if same else mutated


def excerpt(source: str, mutated: str) -> str:
    """Return the changed lines: `- before` and `+ after`."""
    lines = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm=""))[2:]
    return "\n".join(line[0] + " " + line[1:].strip()[:EXCERPT] for line in lines if line[0] in "+-")


def sample(package: str, tree: Path, seed: int, count: int) -> list[Mutant]:
    """Draw mutants at different places, each place equally likely."""
    chance = random.Random(f"{seed} {package}")
    places = mutants_of(package, tree)
    chance.shuffle(places)
    chosen: list[Mutant] = []
    for place in places:
        if len(chosen) == count:
            break
        mutant = chance.choice(place)
        source = (tree / mutant.file).read_text()
        mutated = mutate(source, mutant)
        if mutated is not None:
            chosen.append(replace(mutant, diff=excerpt(source, mutated)))
    return chosen


# ---- running the tests


class Recorder:
    """A pytest plugin that records the first failed test."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


class Runner:
    """Runs tests on a copy of the code, each time in a new process."""

    def __init__(self, folder: Path, tree: Path, tests: Path, arguments: list[str]) -> None:
        self.copy = folder / "copy"
        self.report = folder / "report.json"
        self.log = folder / "log.txt"
        self.arguments = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", *arguments]
        copy_checkouts(tree, tests, self.copy)
        # Orphaned processes become children of this one, so that all are cleaned up.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

    def prepare(self, tests: str) -> float:
        """Run the tests on the unmutated code, and import their dependencies. Return the limit of processor time for
        each mutant. Raises RuntimeError if a test fails.
        """
        result = self._run(tests, 3600.0, mutated=False)
        if result.get("status") != 0:
            raise RuntimeError(f"the tests fail on the unmutated code:\n{self.log.read_text()[-4000:]}")
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/support/triton_kernels.py does
        for name in result["modules"]:
            with suppress(Exception):
                importlib.import_module(name)
        del os.environ["TRITON_INTERPRET"]
        return max(LEAST_LIMIT, TIMES_THE_COST * float(result["seconds"]))

    def test(self, mutant: Mutant, tests: str, limit: float) -> Mutant:
        path = self.copy / mutant.file
        source = path.read_text()
        mutated = mutate(source, mutant)
        if mutated is None or excerpt(source, mutated) != mutant.diff:
            return replace(mutant, outcome="gone")
        outcome, test, seconds = self.test_source(path, mutated, tests, limit)
        return replace(mutant, outcome=outcome, test=test, seconds=round(seconds, 1))

    def test_source(self, path: Path, mutated: str, tests: str, limit: float) -> tuple[str, str, float]:
        """Return the outcome, the first failing test and the processor seconds of the tests if a file has this
        content."""
        source = path.read_text()
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # it could look up to date: equal size and equal second of change
        try:
            path.write_text(mutated)
            result = self._run(tests, limit, mutated=True)
        finally:
            path.write_text(source)
        outcome = {0: "survived", None: "killed"}.get(result.get("status"), "killed")
        return result.get("ended") or outcome, result.get("failed", ""), result["seconds"]

    def _run(self, tests: str, limit: float, mutated: bool) -> dict[str, Any]:
        """Return the process's report, its processor seconds, and the reason if a limit stopped it."""
        self.report.unlink(missing_ok=True)
        shutil.rmtree(self.copy / ".hypothesis", ignore_errors=True)
        foreign = [name for name in sys.modules if fnmatch(name.partition(".")[0], CODE)]
        assert not foreign, f"already imported: {foreign}"
        pid = os.fork()
        if not pid:
            try:
                self._run_pytest(tests, mutated)
            finally:
                os._exit(1)
        ended = ""
        watch = Watch(pid, limit)
        try:
            while True:
                done, _, usage = os.wait4(pid, os.WNOHANG)
                if done:
                    break
                if watch.is_over():
                    ended = "timeout"
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
        finally:
            for left in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    left.kill()
                    left.wait()
        result = json.loads(self.report.read_text()) if self.report.exists() else {}
        return {**result, "seconds": usage.ru_utime + usage.ru_stime, "ended": ended}

    def _run_pytest(self, tests: str, mutated: bool) -> None:
        os.setsid()
        with self.log.open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(self.copy)
        sys.path[:] = [str(self.copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT / "tools")]
        os.environ["PYTHONPATH"] = str(self.copy)
        sys.dont_write_bytecode = mutated
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if mutated else ""
        if importlib.util.find_spec("hypothesis"):
            # Use the same examples for each mutant, and do not shrink failing ones.
            from hypothesis import Phase, settings

            phases = [Phase.explicit, Phase.generate]
            settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
            settings.load_profile("mutants")
        recorder = Recorder()
        files = dict.fromkeys(str(path) for glob in tests.split() for path in sorted(Path().glob(glob)))
        status = pytest.main([*self.arguments, *files], plugins=[recorder])
        modules = [name for name, module in sys.modules.items() if _is_elsewhere(name, module, self.copy)]
        self.report.write_text(json.dumps({"status": int(status), "failed": recorder.failed, "modules": modules}))
        os._exit(0)


def copy_checkouts(tree: Path, tests: Path, target: Path) -> None:
    """Copy the code of one checkout, and everything else from another."""
    for source, code in ((tree, True), (tests, False)):
        for path in source.iterdir():
            if fnmatch(path.name, CODE) != code or any(fnmatch(path.name, pattern) for pattern in NOT_COPIED):
                continue
            if path.is_dir():
                shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns(*NOT_COPIED[:5]))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target / path.name)


class Watch:
    """Stops a mutant whose tests exceed their limits. It checks once per second."""

    def __init__(self, pid: int, limit: float) -> None:
        self.process = psutil.Process(pid)
        self.limit = limit  # seconds of processor time
        self.looks_at = time.monotonic() + 1
        self.progress_at = time.monotonic()
        self.used_then = 0.0

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self.looks_at:
            return False
        self.looks_at = now + 1
        used, memory = self._used()
        if used > self.limit or memory > MEMORY_LIMIT:
            return True
        if now < self.progress_at + PATIENCE:
            return False
        hangs = used < self.used_then + LEAST_PROGRESS
        self.progress_at = now
        self.used_then = used
        return hangs

    def _used(self) -> tuple[float, int]:
        """Return the processor seconds and bytes of memory of the process and its descendants."""
        seconds = 0.0
        memory = 0
        with suppress(psutil.NoSuchProcess):
            seconds += sum(self.process.cpu_times()[2:4])  # of descendants that have ended
            for each in [self.process, *self.process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    seconds += sum(each.cpu_times()[:2])
                    memory += each.memory_info().rss
        return seconds, memory


def _is_elsewhere(name: str, module: Any, copy: Path) -> bool:
    """Whether a module was imported from outside the copied code. Raises AssertionError if quire itself was."""
    file = getattr(module, "__file__", None) or ""
    here = Path(file).is_relative_to(copy)
    assert here or not file or not fnmatch(name.partition(".")[0], CODE), f"{name} comes from {file}"
    return bool(file) and not here and not name.startswith("__")


# ---- the command


def work(number: int, jobs: int, mutants: list[Mutant], chosen: argparse.Namespace) -> None:
    """Run every `jobs`-th mutant of each package, in one of the worker processes."""
    selection = ["-m", chosen.m] if chosen.m is not None else []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(Path(folder), chosen.tree, chosen.tests or chosen.tree, selection)
        for package in dict.fromkeys(mutant.package for mutant in mutants):
            own = [mutant for mutant in mutants if mutant.package == package][number::jobs]
            if not own:
                continue
            tests = PACKAGES[package].tests
            limit = runner.prepare(tests)
            for mutant in own:
                result = runner.test(mutant, tests, limit)
                with chosen.out.open("a") as out:
                    out.write(json.dumps(asdict(result)) + "\n")
                place = f"{result.file}:{result.line}"
                print(f"{result.outcome:9} {result.seconds:6.1f} s  {place}  {result.test}", flush=True)


def read(path: Path) -> list[Mutant]:
    return [Mutant(**json.loads(line)) for line in path.read_text().splitlines()]


def table(results: Iterable[Mutant]) -> str:
    """Markdown."""
    best: dict[Any, Mutant] = {}
    for result in results:
        if result.key not in best or best[result.key].outcome in ("survived", "gone"):
            best[result.key] = result
    lines = ["| package | mutants | killed | of these by a limit | survived | share killed |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for package in dict.fromkeys(result.package for result in best.values()):
        counts = Counter(result.outcome for result in best.values() if result.package == package)
        killed = counts["killed"] + counts["timeout"]
        total = killed + counts["survived"]
        share = f"{killed / total:.0%}" if total else ""
        lines.append(f"| {package} | {total} | {killed} | {counts['timeout']} | {counts['survived']} | {share} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="file for the results, one line of JSON each")
    parser.add_argument("--seed", type=int, default=45, help="chooses the mutants (default: 45)")
    parser.add_argument("--per-package", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="(default: %(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout with the code (default: this one)")
    parser.add_argument("--tests", type=Path, help="checkout with the tests (default: that of --tree)")
    parser.add_argument("-m", metavar="EXPRESSION", help="tests with these markers (default: as in pyproject.toml)")
    parser.add_argument("--mutants", type=Path, help="run the mutants of these results again")
    parser.add_argument("--only-survivors-of", type=Path, help="run the survivors of these results again")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--table", type=Path, nargs="+", help="only print the table of these results")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(result for path in chosen.table for result in read(path)))
        return
    if chosen.out is None:
        parser.error("--out is needed")
    chosen.out, chosen.tree = chosen.out.resolve(), chosen.tree.resolve()
    packages = chosen.packages.split(",")
    if chosen.mutants or chosen.only_survivors_of:
        listed = read(chosen.mutants or chosen.only_survivors_of)
        if not chosen.mutants:
            listed = [mutant for mutant in listed if mutant.outcome == "survived"]
        mutants = [mutant for mutant in listed if mutant.package in packages]
    else:
        mutants = [m for name in packages for m in sample(name, chosen.tree, chosen.seed, chosen.per_package)]
    done = {result.key for result in read(chosen.out)} if chosen.out.exists() else set()
    mutants = [mutant for mutant in mutants if mutant.key not in done]
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(n, chosen.jobs, mutants, chosen)) for n in range(chosen.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(table(read(chosen.out)) if chosen.out.exists() else "no mutants")
    if any(worker.exitcode for worker in workers):
        sys.exit(1)


if __name__ == "__main__":
    main()
