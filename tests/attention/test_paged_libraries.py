"""Backends of other libraries that read pages.

The libraries need a GPU and are not installed, so substitutes take their places: functions with the signatures of the
libraries' sources, which check what they are given, and compute attention as the reference does. This shows that Quire
calls the libraries as documented, not that their kernels work.

Signatures: flash_attn_with_kvcache of flash-attention/hopper/flash_attn_interface.py (commit 01afd16, as in fa3-fwd
0.0.3); flash_attn_varlen_func of flash_attn/cute/interface.py (commit 004b1a2); flashinfer/prefill.py of 0.7.4.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention import Kept, World, build, dense
from torch import Tensor

import quire.attention.selection
import quire.attention.triton.paged_backend as paged
from quire.attention.base import AttentionShape
from quire.attention.selection import choose_backend
from quire.attention.triton.attention_backend import TritonAttention
from quire.attention.triton.backends import BACKENDS
from quire.attention.triton.paged_backend import FlashAttention3, FlashAttention4, FlashInfer
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS
from support.triton_kernels import posing

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not INTERPRETED, reason="poses as other cards"),
]
FLOAT16, CPU = Kept(torch.float16), torch.device("cpu")
MIXED = [(0, 1), (17, 1), (0, 40), (33, 5)]  # (cached, new) tokens
calls: list[str] = []


def attention_over_pages(q, keys, values, starts, lengths, table, scale, window, cap):
    """Attention of each request to its pages, [blocks, page, kv_heads, dim] -> out, lse: [tokens, heads]."""
    page = keys.shape[1]
    parts = []
    for r, length in enumerate(lengths.tolist()):
        pages = table[r, : -(-length // page)].long()
        k, v = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
        parts.append(dense(q[starts[r] : starts[r + 1]], k, v, scale, window, cap or None, None))
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return out.to(q.dtype), lse


def check_pages(q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, table: Tensor) -> None:
    requests = len(lengths)
    blocks, _, kv_heads, dim = keys.shape
    assert values.shape == keys.shape
    assert q.dtype == keys.dtype == values.dtype
    assert q.shape[2] == dim
    assert q.shape[1] % kv_heads == 0
    for x in (q, keys, values, table):
        assert x.stride(-1) == 1
    assert keys.stride() == values.stride()  # FlashInfer needs this
    assert all(stride * keys.element_size() % 16 == 0 for stride in keys.stride()[:-1])  # loads of 16 bytes
    assert keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
    for x, shape in ((starts, (requests + 1,)), (lengths, (requests,)), (table, (requests, table.shape[1]))):
        assert (x.dtype, x.shape) == (torch.int32, shape)
    assert starts.is_contiguous()
    assert blocks > 0


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    calls.append("flash-attn-3")
    check_pages(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table)
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert causal
    assert window_size == (-1, -1) or (window_size[0] >= 0 and window_size[1] == 0)
    window = None if window_size[0] < 0 else window_size[0] + 1
    out, lse = attention_over_pages(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window, softcap
    )
    assert return_softmax_lse
    return out, lse.T.contiguous(), None, None


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
    seqused_k=None, page_table=None, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, cu_total_m_blocks=None, cu_total_n_blocks=None, aux_tensors=None, return_lse=False,
):  # fmt: skip
    calls.append("flash-attn-4")
    check_pages(q, k, v, cu_seqlens_q, seqused_k, page_table)
    assert k.shape[1] == 128
    assert cu_seqlens_k is None  # excludes a page table
    assert causal
    window = None if window_size[0] is None else window_size[0] + 1
    out, lse = attention_over_pages(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window, softcap)
    return out, lse.T.contiguous() if return_lse else None


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
        max_total_num_rows=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True,
    ):  # fmt: skip
        calls.append("plan")
        for x in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert x.dtype == torch.int32
        assert causal
        pages = paged_kv_indptr.diff()
        self.starts = qo_indptr
        self.lengths = ((pages - 1) * page_size + paged_kv_last_page_len).int()
        self.table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for r, count in enumerate(pages.tolist()):
            self.table[r, :count] = paged_kv_indices[paged_kv_indptr[r] : paged_kv_indptr[r + 1]]
        self.options = sm_scale, None if window_left < 0 else window_left + 1, logits_soft_cap
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False, lse_base="log2"):
        calls.append("flashinfer")
        keys, values = paged_kv_cache
        check_pages(q, keys, values, self.starts, self.lengths, self.table)
        assert self.shape == (q.shape[1], *keys.shape[2:])
        made, natural = attention_over_pages(q, keys, values, self.starts, self.lengths, self.table, *self.options)
        assert return_lse
        return made, natural / math.log(2)


def module(name: str, **contents: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    made.__dict__.update(contents)
    return made


@pytest.fixture
def libraries(monkeypatch):
    """All three are installed."""
    calls.clear()
    paged._build_flags.cache_clear()
    found = [
        module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache),
        module("flash_attn"),
        module("flash_attn.cute"),
        module("flash_attn.cute.interface", flash_attn_varlen_func=flash_attn_varlen_func),
        module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper),
    ]
    for each in found:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(paged, "_WORKSPACE", 1024)
    yield
    paged._build_flags.cache_clear()


CASES = [(FlashAttention3, "sm_90", 16), (FlashAttention4, "sm_100", 128), (FlashInfer, "sm_120", 16)]


@pytest.fixture(params=CASES, ids=lambda case: case[0].name)
def backend(request, libraries):
    kind, card, block = request.param
    for _ in posing(CARDS[card]):
        yield build(kind, 8, 2, 64, block, FLOAT16)


@pytest.mark.parametrize("requests", [MIXED, [(0, 40)], [(16, 32), (64, 16)]], ids=["mixed", "prompt", "chunks"])
@pytest.mark.parametrize("how", [{}, {"window": 9}, {"soft_cap": 3.0}], ids=str)
def test_mixed_steps_and_prompts_go_to_the_library(backend, requests, how):
    World(backend, requests).check(**how)
    assert backend.name in calls


def test_decoding_and_options_that_the_library_lacks_are_tritons(backend):
    World(backend, [(33, 1), (5, 1)]).check()
    World(backend, MIXED).check(sinks=torch.linspace(-2, 3, 8))
    World(backend, MIXED).check(bias=torch.randn(8, 9, generator=torch.Generator().manual_seed(0)))
    assert not calls


def test_flashinfer_plans_once_a_step_for_each_kind_of_layer(libraries):
    backend = build(FlashInfer, 8, 2, 64, 16, FLOAT16)
    world = World(backend, MIXED)
    plan, q = backend.plan(world.layout(MIXED)), torch.cat(world.q)
    for window in (None, 9, None, 9):
        backend.attend(q, world.cache, plan, scale=0.125, window=window)
    assert calls.count("plan") == 2
    assert calls.count("flashinfer") == 4
    backend.attend(q, world.cache, backend.plan(world.layout(MIXED)), scale=0.125, window=None)
    assert calls.count("plan") == 3


def test_an_installed_library_is_chosen_for_its_card(libraries, monkeypatch):
    monkeypatch.setattr(quire.attention.selection, "BACKENDS", BACKENDS)
    shape = AttentionShape(8, 2, 128, 16, torch.bfloat16, CPU)
    wanted = {"sm_80": "triton", "sm_90": "flash-attn-3", "sm_100": "triton", "sm_120": "triton"}
    for card, name in wanted.items():
        for _ in posing(CARDS[card]):
            assert choose_backend(shape).name == name
            assert choose_backend(shape, "flashinfer").name == "flashinfer"
            assert choose_backend(replace(shape, batch_invariant=True)).name == "triton"
            assert choose_backend(replace(shape, dtype=torch.float32)).name == "triton"
            assert choose_backend(replace(shape, cell=torch.int8)).name == "triton"
            assert choose_backend(shape, "triton").name == "triton"
    for _ in posing(CARDS["sm_90"]):
        assert choose_backend(shape, "FLASH_ATTN").name == "flash-attn-3"
    for _ in posing(CARDS["sm_100"]):
        assert choose_backend(replace(shape, block_size=128)).name == "flash-attn-4"
        assert "pages of 128" in str(FlashAttention4.unsupported(shape))


def test_without_libraries_nothing_changes(monkeypatch):
    monkeypatch.setattr(quire.attention.selection, "BACKENDS", BACKENDS)
    shape = AttentionShape(8, 2, 128, 16, torch.bfloat16, CPU)
    for _ in posing(CARDS["sm_90"]):
        assert type(choose_backend(shape)) is TritonAttention
        for kind in (FlashAttention3, FlashAttention4, FlashInfer):
            assert "installed" in str(kind.unsupported(shape))


def test_a_build_without_pages_is_not_used(monkeypatch):
    """As that of fa3-fwd 0.0.3."""
    paged._build_flags.cache_clear()
    flags = {"FLASHATTENTION_DISABLE_PAGEDKV": True, "FLASHATTENTION_DISABLE_FP16": True}
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module("fa3_fwd_interface"))
    config = module("fa3_fwd_config", CONFIG={"build_flags": flags})
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", config)
    shape = AttentionShape(8, 2, 128, 16, torch.float16, CPU)
    for _ in posing(CARDS["sm_90"]):
        assert "without paged caches" in str(FlashAttention3.unsupported(shape))
        paged._build_flags.cache_clear()
        flags["FLASHATTENTION_DISABLE_PAGEDKV"] = False
        assert "without float16" in str(FlashAttention3.unsupported(shape))
        assert FlashAttention3.unsupported(replace(shape, dtype=torch.bfloat16)) is None
    paged._build_flags.cache_clear()
