"""The GPU's kernels, run by Triton's interpreter where there is no GPU. To be imported before whatever imports triton.

Triton looks at TRITON_INTERPRET when a function of its own or ours is decorated, and again when it runs; other tests,
and the processes that they start, are not to see it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

INSTALLED = find_spec("triton") is not None
if INSTALLED:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    import quire.attention.triton
    import quire.ops.triton.batch
    import quire.ops.triton.elementwise
    import quire.ops.triton.linear
    import quire.ops.triton.sampling  # noqa: F401

    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
