"""torch is imported more quickly, and works as it does otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

START = """
import gc, sys, threading
from quire.platform.torch_import import quick_imports
with quick_imports():
    assert not gc.isenabled()
    loading = [thread for thread in threading.enumerate() if thread.name == "load-torch"]
    import torch
assert bool(loading) == (sys.platform == "linux")
assert gc.isenabled()
assert gc.get_freeze_count() > 50_000
assert (torch.ones(300, 300) @ torch.ones(300, 300)).sum() == 300**3
"""


AGAIN = """
with quick_imports():
    pass
assert sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path) == 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [START, START + AGAIN])
def test_torch_works(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_ends_the_context_without_a_trace() -> None:
    code = (
        "import gc\nfrom quire.platform.torch_import import quick_imports\n"
        "try:\n    with quick_imports():\n        raise KeyError\nexcept KeyError:\n    assert gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
