"""A process ends without a last search for garbage, and without a word."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.waiting import LONGEST


@pytest.mark.parametrize("library", [pytest.param("torch", marks=pytest.mark.slow), "triton"])
def test_a_process_ends_without_a_word(library: str) -> None:
    pytest.importorskip(library)
    program = (
        f"import atexit; import {library}; from quire.platform.garbage import skip_last_collection; "
        "atexit.register(skip_last_collection)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONGEST, check=True)
    assert done.stdout + done.stderr == ""
