"""Paged attention on the CPU, in C++ (ops/cpu/attention.cpp, where the cache's layout is drawn)."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.ops.cpu.build import kernel, library

_TASK_INTS, _MERGE_INTS = 8, 4  # the sizes of attention.cpp's Task and Merge
_TASKS_PER_THREAD = 4  # at least attention.cpp's


class _Geometry(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("is_bf16", "heads", "kv_heads", "head_dim", "padded_dim", "block_size")]


class _Step(ctypes.Structure):
    _fields_ = [
        ("block_table", ctypes.c_void_p), ("table_stride", ctypes.c_int64), ("tasks", ctypes.c_void_p),
        ("merges", ctypes.c_void_p), ("num_tasks", ctypes.c_int32), ("num_merges", ctypes.c_int32),
        ("partial_rows", ctypes.c_int32), ("threads", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class CpuPlan:
    """A step cut into tasks. `step` points into the tensors, which must live as long."""

    step: _Step
    slots: Tensor
    block_table: Tensor
    tasks: Tensor
    merges: Tensor


class CpuAttention(AttentionBackend):
    """float32 and bfloat16, any head size. Cache: [blocks, kv_heads, 2 (keys, values), block_size * padded dim]."""

    name = "cpu"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._padded_dim = -(-shape.head_dim // 16) * 16
        is_bf16 = shape.dtype is torch.bfloat16
        sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, self._padded_dim, shape.block_size)
        self._geometry = _Geometry(is_bf16, *sizes)
        self._geometry_address = ctypes.addressof(self._geometry)

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cpu":
            return f"the cpu backend does not run on {shape.device.type}"
        if shape.dtype not in (torch.float32, torch.bfloat16):
            return f"the cpu backend has float32 and bfloat16, not {shape.dtype}"
        if shape.block_size % 16 or shape.block_size <= 0:
            return f"the cpu backend needs a block size that is a multiple of 16, not {shape.block_size}"
        if library() is None:
            return "the CPU kernels could not be compiled"
        return None

    def block_bytes(self) -> int:
        s = self.shape
        return 2 * s.block_size * s.num_kv_heads * self._padded_dim * s.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        # Not filled: what was never stored is never read, and memory that was never touched costs nothing.
        s = self.shape
        cache = torch.empty(num_blocks, s.num_kv_heads, 2, s.block_size * self._padded_dim, dtype=s.dtype)
        kernel("quire_advise_huge_pages", "pl")(cache.data_ptr(), cache.nbytes)
        return cache

    def plan(self, layout: StepLayout) -> CpuPlan:
        starts, lengths = layout.query_start_loc.contiguous(), layout.seq_lens.contiguous()
        slots, block_table = layout.slot_mapping.contiguous(), layout.block_table
        if block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        threads, requests = torch.get_num_threads(), len(lengths)
        splits = _TASKS_PER_THREAD * threads
        tasks = torch.empty(len(slots) + requests + splits, _TASK_INTS, dtype=torch.int32)
        merges = torch.empty(splits, _MERGE_INTS, dtype=torch.int32)
        step = _Step(block_table.data_ptr(), block_table.stride(0))
        kernel("quire_attention_plan", "pppiippp")(
            self._geometry_address, starts.data_ptr(), lengths.data_ptr(), requests, threads, tasks.data_ptr(),
            merges.data_ptr(), ctypes.addressof(step),
        )  # fmt: skip
        return CpuPlan(step, slots, block_table, tasks, merges)

    def store(self, cache: Tensor, k: Tensor, v: Tensor, plan: CpuPlan) -> None:
        k, v = _dense(k), _dense(v)
        kernel("quire_attention_store", "pppllpllpli")(
            self._geometry_address, cache.data_ptr(), k.data_ptr(), k.stride(0), k.stride(1), v.data_ptr(),
            v.stride(0), v.stride(1), plan.slots.data_ptr(), len(plan.slots), plan.step.threads,
        )  # fmt: skip

    def attend(
        self, q: Tensor, cache: Tensor, plan: CpuPlan, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        q = _dense(q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        kernel("quire_attention_attend", "pppllpfipp")(
            self._geometry_address, ctypes.addressof(plan.step), q.data_ptr(), q.stride(0), q.stride(1),
            cache.data_ptr(), scale, window or 0, out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return out, lse


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
