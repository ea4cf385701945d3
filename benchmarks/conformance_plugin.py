"""A pytest plugin that runs llama.cpp's server tests against another server, used by benchmarks/conformance.py.

API paths that both servers have get their usual prefix /v1. Texts are not compared, since they are from another model.
The variable CONFORMANCE_LOG names the file for the results, with a line of JSON for each test.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_SHARED = {"/chat/completions", "/responses", "/models"}
_paths: set[str] = set()  # requested by the test


def pytest_sessionstart() -> None:
    import utils  # the suite's module, already imported by its conftest.py

    make_url = utils.ServerProcess.make_url

    def make_shared_url(self: Any, path: str, host: str | None = None) -> str:
        _paths.add(path.split("?")[0])
        return str(make_url(self, f"/v1{path}" if path in _SHARED else path, host))

    utils.ServerProcess.make_url = make_shared_url
    utils.match_regex = lambda *_: True


def pytest_runtest_setup() -> None:
    _paths.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    result = {
        "id": report.nodeid.removeprefix("unit/"),
        "outcome": report.outcome,
        "paths": sorted(_paths),
        "error": crash.message if crash else str(report.longrepr or ""),
    }
    with Path(os.environ["CONFORMANCE_LOG"]).open("a") as log:
        log.write(json.dumps(result) + "\n")
