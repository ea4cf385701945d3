"""Triton kernels for GPUs. The attention backends that launch them are in quire/attention/triton.

quire/ops imports them if there is a GPU. For tests, Triton's interpreter (TRITON_INTERPRET=1) runs them on a CPU.
"""

import quire.ops  # noqa: F401  # declares the operations, and registers the kernels of this package
