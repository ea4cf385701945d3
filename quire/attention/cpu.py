"""Paged attention on the CPU, in C++ (ops/cpu/attention.h, where the cache's layout is drawn)."""

import ctypes
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, Preparation, PreparingBackend, Scores, Selection, StepLayout
from quire.attention.cells import SCALE_BYTES
from quire.ops.cpu.build import CODES, kernel, library
from quire.ops.cpu.units import TYPES

_TASK_INTS, _MERGE_INTS = 8, 4  # int32s in Task and Merge of attention.h
_TASKS_PER_THREAD = 4  # at least as many as in attention.h
_CELLS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.float16: 3}


class _Geometry(ctypes.Structure):
    _names = "dtype cells is_latent heads kv_heads block_size head_dim padded_dim out_dim padded_out_dim by_slot"
    _fields_ = [(name, ctypes.c_int32) for name in _names.split()]


class _Step(ctypes.Structure):
    _fields_ = [
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("tasks", ctypes.c_void_p),
        ("merges", ctypes.c_void_p),
        ("num_tasks", ctypes.c_int32),
        ("num_merges", ctypes.c_int32),
        ("partial_rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@dataclass
class CpuPlan:
    """A step divided into tasks. `step` points into the tensors, so they must live as long as it does."""

    step: _Step
    slots: Tensor
    block_table: Tensor
    tasks: Tensor
    merges: Tensor


class CpuAttention(PreparingBackend):
    """Supports any sizes. Cache: [blocks, kv_heads, 2 (keys, values), block_size * padded dim].

    A latent cache has only keys. A cache of cells consists of bytes: the cells of a block, followed by block_size
    scales.
    """

    name = kernels = "cpu"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        is_latent = shape.value_dim is not None
        self.cache_dtype, token = shape.dtype, _padded(shape.head_dim)
        storage = ""
        if shape.cell is torch.float16:
            self.cache_dtype = shape.cell
            storage = "_fp16"
        elif shape.cell is not None:
            self.cache_dtype = torch.uint8
            token = token + SCALE_BYTES
            storage = "_cells"
        self.block_shape = (shape.num_kv_heads, 1 if is_latent else 2, shape.block_size * token)
        self._geometry = _Geometry(
            CODES[shape.dtype],
            _CELLS[shape.cell],
            is_latent,
            shape.num_heads,
            shape.num_kv_heads,
            shape.block_size,
            shape.head_dim,
            _padded(shape.head_dim),
            shape.out_dim,
            _padded(shape.out_dim),
            shape.by_slot,
        )
        self._geometry_address = ctypes.addressof(self._geometry)
        self._attend = f"quire_attention_attend_{TYPES[CODES[shape.dtype]]}{storage}"

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cpu":
            return f"the cpu backend does not run on {shape.device.type}"
        if shape.dtype not in CODES:
            return f"the cpu backend does not support {shape.dtype}"
        if shape.cell is torch.float16 and shape.dtype is not torch.float32:
            return f"the cpu backend stores float16 only for float32, not for {shape.dtype}"
        if shape.block_size % 16 or shape.block_size <= 0:
            return f"the cpu backend needs a block size that is a multiple of 16, not {shape.block_size}"
        if library() is None:
            return "the CPU kernels could not be compiled"
        return None

    def plan(self, layout: StepLayout, previous: CpuPlan | None = None) -> CpuPlan:
        starts = layout.query_start_loc.contiguous()
        lengths = layout.seq_lens.contiguous()
        slots = layout.slot_mapping.contiguous()
        block_table = layout.block_table
        if block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        threads = torch.get_num_threads()
        requests = len(lengths)
        if previous is None:
            splits = _TASKS_PER_THREAD * threads
            tasks = torch.empty(len(slots) + requests + splits, _TASK_INTS, dtype=torch.int32)
            previous = CpuPlan(_Step(), slots, block_table, tasks, torch.empty(splits, _MERGE_INTS, dtype=torch.int32))
        else:
            previous.slots.copy_(slots)
            previous.block_table = block_table
        previous.step.block_table, previous.step.table_stride = block_table.data_ptr(), block_table.stride(0)
        kernel("quire_attention_plan", "pppiippp")(
            self._geometry_address,
            starts.data_ptr(),
            lengths.data_ptr(),
            requests,
            threads,
            previous.tasks.data_ptr(),
            previous.merges.data_ptr(),
            ctypes.addressof(previous.step),
        )
        return previous

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: CpuPlan) -> None:
        k = _dense(k)
        v = k if v is None else _dense(v)  # a latent cache ignores v
        kernel("quire_attention_store", "pplpllpllplp")(
            self._geometry_address,
            cache.data_ptr(),
            cache.stride(0),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            plan.slots.data_ptr(),
            len(plan.slots),
            ctypes.addressof(plan.step),
        )

    def read(self, cache: Tensor, blocks: Tensor, plane: int) -> Tensor:
        s = self.shape
        dim = _padded(self.shape.head_dim)
        pair = torch.float32.itemsize // self.cache_dtype.itemsize
        stored = cache[blocks.long(), :, plane]  # [blocks, kv_heads, block_size * dim]
        if plane == 0:
            x = stored.view(len(blocks), s.num_kv_heads, dim // pair, s.block_size, pair).permute(0, 3, 1, 2, 4)
        else:
            x = stored.view(len(blocks), s.num_kv_heads, s.block_size // pair, dim, pair).permute(0, 2, 4, 1, 3)
        return x.reshape(-1, s.num_kv_heads, dim)[..., : s.head_dim]

    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: CpuPlan, prep: Preparation) -> None:
        q_weight = prep.q_weight
        k_weight = prep.k_weight
        cos = prep.cos
        sin = prep.sin
        kernel("quire_attention_prepare", "pplpllpllpllplpppifppli")(
            self._geometry_address,
            cache.data_ptr(),
            cache.stride(0),
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            plan.slots.data_ptr(),
            len(plan.slots),
            ctypes.addressof(plan.step),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            q_weight is not None and q_weight.dtype is torch.float32,
            prep.eps,
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            0 if cos is None else cos.shape[1],
            prep.interleaved,
        )

    def select(self, q: Tensor, weights: Tensor, cache: Tensor, selection: Selection) -> None:
        q = q.contiguous()
        weights = weights.contiguous()
        slots = selection.slots
        scores = selection.scores
        kernel("quire_select", "pplllpplpppppll")(
            self._geometry_address,
            q.data_ptr(),
            *q.shape[:2],
            q.stride(0),
            weights.data_ptr(),
            cache.data_ptr(),
            cache.stride(0),
            ctypes.addressof(selection.place),
            selection.rows.data_ptr(),
            selection.seen.data_ptr(),
            slots.data_ptr(),
            None if scores is None else scores.data_ptr(),
            slots.shape[1],
            torch.get_num_threads(),
        )

    def attend(self, q: Tensor, cache: Tensor, plan: CpuPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        window = scores.get("window")
        soft_cap = scores.get("soft_cap")
        sinks = scores.get("sinks")
        bias = scores.get("bias")
        q = _dense(q)
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, self.shape.out_dim)
        lse = torch.empty(tokens, heads, dtype=torch.float32)
        kernel(self._attend, "pppllplfifppipp")(
            self._geometry_address,
            ctypes.addressof(plan.step),
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            cache.data_ptr(),
            cache.stride(0),
            scores["scale"],
            window or 0,
            soft_cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            None if bias is None else bias.data_ptr(),
            0 if bias is None else bias.shape[1] // 2,
            out.data_ptr(),
            lse.data_ptr(),
        )
        return out, lse


def _padded(dim: int) -> int:
    return -(-dim // 16) * 16


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
