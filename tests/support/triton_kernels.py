"""The GPU's kernels, run by Triton's interpreter if there is no GPU. Import this before anything imports triton.

Triton reads TRITON_INTERPRET when a kernel is decorated and again when it runs. Other tests, and the processes that
they start, must not see the variable.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
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
    import quire.ops.triton.sampling
    import quire.ops.triton.state_chunks
    import quire.ops.triton.states
    import quire.ops.triton.sums  # noqa: F401

    os.environ.pop("TRITON_INTERPRET", None)


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """The interpreter's product, with sums of floats in float64. On some processors, numpy's sums in float32 depend on
    the place of a row in its matrix, which those of GPUs do not."""
    if a.data.dtype != np.float32:
        return _create_dot(builder, a, b, d, *options)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


if INSTALLED:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _create_dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = _dot


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
