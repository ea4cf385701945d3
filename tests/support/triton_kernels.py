"""The GPU's kernels, run by Triton's interpreter if there is no GPU. Import this before anything imports triton.

Triton reads TRITON_INTERPRET when a kernel is decorated and again when it runs. Other tests, and the processes that
they start, must not see the variable.
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
    import quire.attention.triton.attention_backend
    import quire.ops.triton.batch
    import quire.ops.triton.convolution
    import quire.ops.triton.dense
    import quire.ops.triton.drafts
    import quire.ops.triton.elementwise
    import quire.ops.triton.encoder_attention
    import quire.ops.triton.float8
    import quire.ops.triton.linear
    import quire.ops.triton.lora
    import quire.ops.triton.masks
    import quire.ops.triton.partials
    import quire.ops.triton.rounding
    import quire.ops.triton.sampling
    import quire.ops.triton.state_chunks
    import quire.ops.triton.states
    import quire.ops.triton.sums  # noqa: F401
    from support.interpreter import install, pose_as, posing  # noqa: F401  # for tests

    install()
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
