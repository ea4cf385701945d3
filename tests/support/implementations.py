"""The implementations of an op that can run on a CPU. Triton's have their own tests, in tests/ops/test_triton*.py."""

from __future__ import annotations

from quire.ops import OPS
from quire.ops.registry import Implementation


def for_cpus(op: str) -> list[Implementation]:
    return [i for i in OPS[op].implementations if not i.name.startswith("triton")]
