"""Checkpoints and reference outputs for all tests, made once a session."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for benchmarks; last, so that the installed quire is tested
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts a background job so, and every process that a test starts and interrupts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import HealthCheck, settings

import quire.models.transformers_backend  # noqa: F401 - first: lets torchvision be imported beside any torch
import support.triton_kernels  # first: it says how triton is imported
from quire.platform.gpu.cards import CARDS
from support import costs, skips
from support.checkpoints import ALL_VARIANTS, Checkpoints
from support.reference import References
from support.speculation import CHOICES, Everywhere
from support.waiting import LONGEST

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
interpreter = support.triton_kernels.interpreter
TESTS = Path(__file__).parent
SHARED = {TESTS / "server"}  # folders whose files share engines
QUICK = frozenset((TESTS / "quick.txt").read_text().split())  # files of many tests that take little time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the documents that tests produce, don't compare them")
    parser.addoption("--speculate", choices=CHOICES, help="run the tests marked texts, with drafts of this kind")
    parser.addoption("--card", choices=[*CARDS], help="the card that Triton's interpreter poses as; else a small one")
    parser.addoption("--sample-seed", type=int, default=0, metavar="N", help="which cases of large matrices run")
    parser.addoption("--record-features", action="store_true", help="note which features tests combine, in tests/data")
    costs.pytest_addoption(parser)
    skips.pytest_addoption(parser)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than processors, as tests often wait for servers and ranks that they start; each takes up to 2 GB."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: tests of the files in tests/quick.txt, which take a minute together")
    config.addinivalue_line("markers", "family(name): tests of a family of models")
    config.addinivalue_line("markers", "texts: compares what engines say; runs with drafts, too, by --speculate")
    config.addinivalue_line(
        "markers", "sampled(n): of these cases, one in n runs each time, and at least one; the others are nightly"
    )
    config.addinivalue_line("markers", "plain(reason): though marked texts, it cannot run with drafts")
    if card := config.getoption("--card"):
        support.triton_kernels.pose_as(CARDS[card])
    if name := config.getoption("--speculate"):
        config.pluginmanager.register(Everywhere(name))
    if config.getoption("--record-features"):
        from support import combinations  # imports the engine

        combinations.register(config)
    costs.pytest_configure(config)
    skips.pytest_configure(config)


def pytest_report_header(config: pytest.Config) -> str:
    return f"sampled cases: --sample-seed {config.getoption('sample_seed')} (-m nightly runs the others)"


def is_quick(file: Path) -> bool:
    return file.is_relative_to(TESTS) and file.relative_to(TESTS).as_posix() in QUICK


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, the files that have no such test need not be imported."""
    if config.getoption("markexpr") != "quick" or not collection_path.name.startswith("test_"):
        return None
    return not is_quick(collection_path) or None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests stay together in one process: those of a file or a folder, but those of a family of models wherever
    they are. Which cases of large matrices are nightly: their names and the seed decide, so all processes agree."""
    seed = config.getoption("sample_seed")
    matrices: dict[tuple[str, bool], list[tuple[float, float, pytest.Item]]] = {}
    for item in items:
        marks = {marker.name for marker in item.iter_markers()}
        if is_quick(item.path) and not {"slow", "nightly"} & marks:
            item.add_marker(pytest.mark.quick)
        if "sampled" in marks and "nightly" not in marks:
            one_in = max(marker.args[0] for marker in item.iter_markers("sampled"))
            drawn = -math.log1p(-zlib.crc32(item.nodeid.encode(), seed) / (1 << 32))  # exponentially distributed
            cases = matrices.setdefault((item.nodeid.partition("[")[0], "slow" in marks), [])
            cases.append((drawn * one_in, 1 / one_in, item))
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        variant = parameters.get("variant")
        family = ALL_VARIANTS[variant][0] if variant in ALL_VARIANTS else None
        if family:
            item.add_marker(pytest.mark.family(name=family))
        file = item.nodeid.partition("::")[0]
        shared = item.path.parent in SHARED and "slow" not in marks
        item.add_marker(pytest.mark.xdist_group(family or (file.rpartition("/")[0] if shared else file)))
    for cases in matrices.values():
        cases.sort(key=lambda case: case[0])
        for _, _, item in cases[max(1, round(sum(share for _, share, _ in cases))) :]:
            item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Python's collector need not look through millions of objects of imported modules during each test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _log_unconfigured() -> Iterator[None]:
    """A command that a test or a fixture runs configures the log for its process. Every test starts and ends without.

    Its handler would write to a standard error that is closed in later tests, and its level would hide their records.
    """
    _forget_log()
    yield
    _forget_log()


@pytest.fixture(autouse=True)
def _patient_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is given up after ten seconds, which other processes can take up."""
    monkeypatch.setattr("quire.structured.workers.TOTAL_LIMIT", LONGEST)


def _forget_log() -> None:
    for name in ("quire", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> References:
    return References(checkpoints)
