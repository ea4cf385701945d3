"""Triton kernels for GPUs, and the attention backends that launch them.

The engine loads them by name where there is a GPU (quire/ops and quire/attention/selection.py). For tests, Triton's
interpreter (TRITON_INTERPRET=1) runs them on a CPU.
"""

import quire.ops  # noqa: F401  # declares the operations, and registers the kernels of this package
