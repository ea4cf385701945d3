"""The scan of long spans in chunks of tokens, by matrix products (ops/reference/states.py defines the scan).

Let S be the state before a chunk, D(j, i) the product of the decays of the tokens after j up to i, and D(i) that of all
tokens of the chunk up to i. In the notation of the definition, a chunk computes for its tokens i:

    plain:    change(i) = scale(i) v(i)
    delta:    change(i) = scale(i) (v(i) - k(i) D(i) S - sum over j < i of (k(i) D(j, i) k(j)) change(j))
    out(i)  = q(i) D(i) S + sum over j <= i of (q(i) D(j, i) k(j)) change(j)
    S       = D(last) S + sum over j of D(j, last) k(j) change(j)

This is Mamba-2's form (arXiv:2405.21060, section 6). With the delta rule, each change depends on earlier ones, which
gives a triangular system. With its inverse T, one product computes all changes from S: change = T scale v - (T scale k
D) S (arXiv:2412.06464, section 3.3). In RWKV-7, the removed values also form such a system: removed(i) = r(i) D(i - 1)
S + sums over j < i. Each is subtracted along its write key. The added values are known beforehand. So there are two
kernels:

    _prepare      for each chunk, all at once: the factors of changes in the results, T times the values, T times keys
    _scan_chunks  from chunk to chunk, with a state of KEYS x COLUMNS numbers in registers

No decay is divided by another one: each D is a product of the decays themselves, so a decay may be 0, and a long
product of small decays is 0. If a head has one decay, D(j, i) is a matrix. If each element of a key has its own decay,
the pairs (j, i) are processed in levels. Level n contains the pairs with j in the first half and i in the second half
of the same 2 n tokens. There D(j, i) = D(j, end of the half) D(begin of the half, i), so one product computes a level.

Chunks begin at multiples of CHUNK in a block. They end where a block ends, and where a page's state ends (`certain`).
Products of the model's numbers and states use TF32, which has float32's range, and sums use float32. A result depends
on where a span begins, so batch-invariant engines process tokens one after the other.
"""

import torch
import triton
from torch import Tensor

from quire.ops.reference import states as reference
from quire.ops.reference.states import Pages, StatePlan
from quire.ops.triton.state_chunk_kernels import _prepare, _scan_chunks
from quire.ops.triton.states import scan_spans
from quire.ops.triton.targets import on_gpu, precision
from quire.platform.gpu.cards import card_of

_SHORT = 16  # spans up to this number of tokens are computed token by token
_CHUNK = 32  # tokens
_COLUMNS = 32  # columns of a head's state per program of _scan_chunks
_PART = 32  # elements of keys and values that _prepare processes at a time; half as many if each has its own decay
_WARPS = 8  # per program of _scan_chunks
_MOST_KEYS = 128  # elements of a key; the machine code for longer keys has not been checked


@reference.scan.implementation("triton_chunks", supports=on_gpu, invariant_on=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: Tensor,
    skip: Tensor | None,
    pages: Pages,
    plan: StatePlan,
    rule: str,
) -> Tensor:
    out, (tokens, heads, value_dim), key_dim = v.new_empty(v.shape), v.shape, k.shape[2]
    by_channel = decay.shape[1] > heads
    removes = rule == "removal"
    solves = rule != "plain"
    keys = max(16, triton.next_power_of_2(key_dim))
    # Bytes of shared memory that _scan_chunks uses for a chunk, as compiled for sm_80 and sm_90. The next chunk is
    # loaded ahead where it fits.
    stage = keys * ((360 if by_channel else 242 + 64 * v.itemsize) + 240 * removes)
    stages = min(2, card_of(v.device).shared_memory // stage)
    if stages and keys <= _MOST_KEYS and tokens > _SHORT and not 0 < plan.tokens_per_request <= _SHORT:
        sizes = _CHUNK * (1 + removes), key_dim * solves, value_dim * solves, key_dim * (3 + removes) * by_channel
        made = [torch.empty(tokens, heads, size, dtype=torch.float32, device=v.device) for size in sizes]
        slots = tokens // _CHUNK + tokens // plan.block_size + 4 * len(plan.lengths)  # as in _slots
        strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), scale.stride(0)
        ratio = heads // k.shape[1]
        numbers = precision(v.dtype)
        _prepare[slots, heads](
            *made,
            q,
            k,
            v,
            decay,
            scale,
            plan.starts,
            plan.lengths,
            *strides,
            len(plan.lengths),
            heads,
            ratio,
            value_dim,
            plan.block_size,
            plan.drafts,
            _SHORT,
            _CHUNK,
            _CHUNK.bit_length() - 1,
            key_dim,
            _PART // (1 + by_channel),
            by_channel,
            rule == "delta",
            removes,
            numbers,
            num_warps=8 if by_channel else 4,
        )
        _scan_chunks[len(plan.lengths), heads, triton.cdiv(value_dim, _COLUMNS)](
            out,
            *made,
            q,
            k,
            v,
            decay,
            scale,
            skip,
            pages.state,
            pages.behind,
            pages.number,
            plan.starts,
            plan.lengths,
            plan.table,
            *strides,
            pages.state.stride(0),
            plan.table.stride(0),
            heads,
            ratio,
            pages.behind.shape[2],
            value_dim,
            plan.block_size,
            plan.drafts,
            _SHORT,
            _CHUNK,
            key_dim,
            keys,
            _COLUMNS,
            by_channel,
            rule == "delta",
            skip is not None,
            removes,
            numbers,
            num_warps=_WARPS,
            num_stages=stages,
        )
        scan_spans(out, q, k, v, decay, scale, skip, pages, plan, rule, _SHORT)
    else:
        scan_spans(out, q, k, v, decay, scale, skip, pages, plan, rule)
    return out
