"""Every implementation of every op against its reference, and the references against what is known from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import OPS, Kernels, Target
from quire.ops.reference.drafts import draft_seeds
from quire.ops.reference.routing import Routing
from quire.ops.reference.sampling import gumbel_noise, philox
from support.implementations import for_cpus

Arguments = tuple[Any, ...]
SIZES = (1, 3, 16, 17, 48, 128, 1030)
TOKENS = (0, 1, 5, 70)


def draw(dtype: torch.dtype, *size: int) -> Tensor:
    return (torch.randn(*size) * 2).to(dtype)


def slice_of_wider(x: Tensor) -> Tensor:
    """x as columns of a wider tensor, as a slice of a fused projection is."""
    wide = torch.cat([x, x.flip(-1), x], dim=-1)
    return wide[..., x.shape[-1] : 2 * x.shape[-1]].flip(0) if x.shape[0] == 0 else wide[..., : x.shape[-1]]


def weights(dtype: torch.dtype, dim: int) -> list[Tensor]:
    """Of the tensors' own type, and of float32, with which the product is rounded instead."""
    return [draw(d, dim) for d in {dtype, torch.float32}]


def rms_norm_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for dim in SIZES:
        for tokens in TOKENS:
            x = draw(dtype, tokens, dim)
            for weight in weights(dtype, dim):
                yield x, weight, 1e-6
                yield slice_of_wider(x), weight, 1e-5
    fused = draw(dtype, 7, 5 * 40)
    yield fused[:, 40:160].unflatten(1, (3, 40)), draw(dtype, 40), 1e-6  # the heads of q in a fused projection
    yield draw(dtype, 40, 7).t(), draw(dtype, 40), 1e-6
    yield draw(dtype, 2, 3, 4, 24), draw(dtype, 24), 1e-6
    yield draw(dtype, 300, 512), draw(dtype, 512), 1e-6  # enough for several threads


def add_rms_norm_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for dim in SIZES:
        for tokens in TOKENS:
            x, residual = draw(dtype, tokens, dim), draw(dtype, tokens, dim)
            for weight in weights(dtype, dim):
                yield x, residual, weight, 1e-6
                yield slice_of_wider(x), slice_of_wider(residual), weight, 1e-5
    same = draw(dtype, 4, 32)
    yield same, same, draw(dtype, 32), 1e-6


def layer_norm_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for dim in SIZES[1:]:  # the norm of one number is what rounding leaves of 0
        for tokens in TOKENS:
            x = draw(dtype, tokens, dim)
            for weight in (draw(dtype, dim), None):
                for bias in (draw(dtype, dim), None):
                    yield x, weight, bias, 1e-6
                    yield slice_of_wider(x) + 3, weight, bias, 1e-5
    yield draw(dtype, 40, 7).t(), draw(dtype, 40), None, 1e-6
    yield draw(dtype, 2, 3, 24), draw(dtype, 24), draw(dtype, 24), 1e-6
    heads = draw(dtype, 5, 6, 40)[:, 2:, :33]
    yield heads, draw(dtype, 33), None, 1e-6
    yield heads, draw(dtype, 4, 33), None, 1e-6
    yield draw(dtype, 300, 512), draw(dtype, 512), None, 1e-6  # enough for several threads


def add_layer_norm_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for x, *others in layer_norm_cases(dtype):
        if x.dim() == 2:
            yield x, draw(dtype, *x.shape), *others
            yield x, slice_of_wider(draw(dtype, *x.shape)), *others
    same = draw(dtype, 4, 32)
    yield same, same, draw(dtype, 32), None, 1e-6


def add_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, dim in ((0, 16), (1, 1), (3, 17), (5, 1030), (33, 4096)):
        x, residual, out = (draw(dtype, tokens, dim) for _ in range(3))
        yield x, residual, out
        yield slice_of_wider(x), residual, out


def gated_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for half in SIZES:
        for tokens in TOKENS:
            x = draw(dtype, tokens, 2 * half) * 4
            yield (x,)
            yield (slice_of_wider(x),)
    yield (torch.linspace(-200, 200, 4000).to(dtype).view(2, 2000),)
    yield (draw(dtype, 300, 2 * 512),)


def gelu_and_mul_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for arguments in gated_cases(dtype):
        yield arguments
        yield *arguments, "tanh"


def relu_and_mul_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for arguments in gated_cases(dtype):
        yield arguments
        yield *arguments, True


def xielu_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    """Small numbers, too, of which e^x - 1 - x would keep no digit if it were computed so."""
    slopes = torch.tensor([0.8]), torch.tensor([1.3])
    for scale in (4.0, 0.1, 1e-4):
        for shape in ((0, 8), (1, 1), (3, 37), (70, 1000)):
            yield scale * draw(dtype, *shape), *slopes
        yield scale * slice_of_wider(draw(dtype, 5, 33)), *slopes


def clip_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for shape in ((0, 8), (1, 1), (3, 37), (70, 1000)):
        yield 3 * draw(dtype, *shape), 2.5
    yield slice_of_wider(3 * draw(dtype, 5, 33)), 0.5


def join_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, first, second in ((0, 2, 4, 4), (1, 1, 3, 5), (7, 3, 33, 8), (200, 4, 64, 32)):
        yield draw(dtype, tokens, heads, first), draw(dtype, tokens, heads, second)
        wider = draw(dtype, tokens, heads, first + second + 3)
        yield wider[..., :first], wider[..., first + 1 : first + 1 + second]


def sharpen_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, dim in ((0, 2, 8), (1, 1, 3), (7, 3, 33), (200, 4, 64)):
        positions = torch.randint(100_000, (tokens,))
        yield draw(dtype, tokens, heads, dim), positions, 0.1, 8192, 1
        yield draw(dtype, tokens, heads, dim + 8)[..., 4 : dim + 4], positions, 0.3, 7, 0


def append_positions_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, kv_heads, dim in ((0, 2, 1, 8), (1, 1, 1, 3), (7, 6, 3, 33), (200, 4, 4, 64)):
        qkv = draw(dtype, tokens, heads + 2 * kv_heads, dim)
        parts = qkv.split([heads, kv_heads, kv_heads], 1)
        yield *parts, draw(dtype, heads), torch.randint(65_536, (tokens,))


def swiglu_oai_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for arguments in gated_cases(dtype):
        yield arguments
        yield *arguments, 0.5, 3.0


def limited_swiglu_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for arguments in gated_cases(dtype):
        yield *arguments, 0.7
        yield *arguments, 0.7, True


def rotary_embedding_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for head_dim, rotary_dim in ((128, 128), (64, 64), (80, 32), (24, 24), (6, 6), (2, 2)):
        for tokens in (0, 1, 3, 65):
            fused = draw(dtype, tokens, 6 * head_dim)
            q, k = (x.unflatten(1, (-1, head_dim)) for x in (fused[:, : 4 * head_dim], fused[:, 4 * head_dim :]))
            angle = torch.randn(tokens, rotary_dim // 2) * 10
            for interleaved in (False, True):
                yield q, k, angle.cos(), angle.sin(), interleaved
                yield q.contiguous(), k.contiguous(), 0.7 * angle.cos(), 0.7 * angle.sin(), interleaved
    angle = torch.randn(32, 3) * 10
    yield draw(dtype, 3, 4, 64), draw(dtype, 3, 1, 64), angle.cos().t(), angle.sin().t()
    latent = draw(dtype, 3, 1, 96)[..., 32:]  # the last elements of a head
    yield draw(dtype, 3, 4, 96)[..., 32:], latent, angle.cos().t(), angle.sin().t(), True


def linear_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, inner, outer in ((1, 64, 96), (5, 64, 96), (17, 33, 7), (0, 16, 16)):
        yield draw(dtype, rows, inner), draw(dtype, outer, inner), draw(dtype, outer)
        yield draw(dtype, rows, inner), draw(dtype, outer, inner), None


def grouped_linear_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for counts in ((1, 0, 2), (0, 0, 0), (0, 5, 0, 0), (13, 1, 6, 7), (1,) * 40, (3, 90, 0, 0), (40, 0, 90)):
        offsets = torch.tensor([0, *counts]).cumsum(0)
        for inner, outer in ((64, 96), (33, 7), (1, 1), (100, 70), (512, 37), (40, 4)):
            x, weight = draw(dtype, sum(counts), inner), draw(dtype, len(counts), outer, inner) / inner**0.5
            yield x, weight, draw(dtype, len(counts), outer), offsets
            yield slice_of_wider(x), weight, None, offsets
    bounds = [0, *torch.randint(0, 300, (127,)).sort().values.tolist(), 300]
    yield draw(dtype, 300, 256), draw(dtype, 128, 64, 256) / 16, None, torch.tensor(bounds)
    weight, offsets = draw(dtype, 6, 48, 80), torch.tensor([0, 1, 9, 9])
    yield draw(dtype, 9, 40), weight[::2, 8:40, 40:], draw(dtype, 3, 32), offsets  # parts of larger experts
    yield draw(dtype, 40, 9).t(), weight[:3, :, ::2], None, offsets


def activate_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for name in ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu", "relu2"):
        for shape in ((0, 8), (1, 1), (3, 37), (70, 1000)):
            yield 3 * draw(dtype, *shape), name
        yield slice_of_wider(draw(dtype, 5, 33)), name
        yield draw(dtype, 9, 40).t(), name


def linear_by_head_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, inner, outer in ((0, 2, 16, 16), (1, 3, 32, 48), (7, 2, 33, 5), (40, 4, 128, 64)):
        weight = draw(dtype, heads, outer, inner) / inner**0.5
        yield draw(dtype, tokens, heads, inner), weight
        yield draw(dtype, heads, tokens, inner).transpose(0, 1), weight
        yield draw(dtype, tokens, heads, inner + 8)[..., :inner], weight


def combine_experts_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, top_k, dim in ((0, 2, 16), (1, 1, 5), (3, 8, 33), (50, 4, 700)):
        yield draw(dtype, tokens * top_k, dim), torch.randperm(tokens * top_k), torch.rand(tokens, top_k)

    yield draw(dtype, 7, 40), torch.randperm(7), None


def choose_experts_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    """All scores of a token differ, so that only one choice is right, also in bfloat16."""
    for tokens, experts, routing in (
        (0, 8, Routing(2)),
        (1, 4, Routing(1)),
        (5, 8, Routing(2, scoring="sigmoid", normalize=False)),
        (40, 60, Routing(6, scale=2.5)),
        (9, 128, Routing(8, scoring="sigmoid", groups=8, topk_groups=3, group_score="two_best", scale=2.5)),
        (9, 33, Routing(3, groups=3, topk_groups=2)),
        (300, 16, Routing(2, scoring="sparse_mixer", jitter=0.01)),
        (90, 24, Routing(6, scoring="sqrt_softplus", scale=1.5)),
    ):
        order = torch.rand(tokens, experts).argsort(1)
        logits = ((order - experts / 2) / 16).to(dtype)
        yield logits, None, routing
        yield slice_of_wider(logits), torch.linspace(0, 0.3, experts), routing


def sort_by_expert_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, top_k, count, dim in ((0, 2, 4, 8), (1, 1, 1, 5), (7, 3, 9, 33), (300, 4, 6, 70)):
        x, experts = draw(dtype, tokens, dim), torch.randint(count + 1, (tokens, top_k))  # the last one is not here
        yield x, experts, torch.arange(count + 1)
        yield slice_of_wider(x), experts, torch.arange(count + 1)


def multiply_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, dim in ((0, 8), (1, 1), (3, 37), (70, 1000)):
        x = draw(dtype, rows, dim)
        for factor in (0.22, draw(torch.float32, dim), draw(dtype, dim), draw(dtype, rows, 1), torch.rand(rows, 1)):
            yield x, factor
            yield slice_of_wider(x), factor
        yield x, draw(torch.float32, 2 * dim)[::2]
        yield slice_of_wider(x), slice_of_wider(draw(dtype, rows, dim))
        yield x, draw(torch.float32, rows, dim)


def lerp_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for mixes, rows, dim in ((1, 0, 8), (1, 1, 1), (6, 3, 37), (2, 70, 1000)):
        x, other = draw(dtype, rows, dim), slice_of_wider(draw(dtype, rows, dim))
        for weight in weights(dtype, mixes * dim):
            yield x, other, weight.view(mixes, 1, dim)
        yield other, x, draw(dtype, mixes, rows, dim)
        yield x, other, draw(torch.float32, mixes, 2 * dim)[:, None, dim:]


def removal_keys_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, dim in ((0, 2, 8), (1, 1, 3), (7, 3, 33), (200, 4, 64)):
        r, k, decay, rate = (draw(dtype, tokens, heads * dim) for _ in range(4))
        read = torch.nn.functional.normalize(draw(torch.float32, tokens, heads, dim), dim=-1).to(dtype)
        numbers = [draw(torch.float32, heads * dim) for _ in range(2)]
        yield r, k, read, decay, rate, *numbers
        yield r, slice_of_wider(k), read, 20 * decay, slice_of_wider(20 * rate), *numbers


def add_bonus_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for tokens, heads, dim in ((0, 2, 8), (1, 1, 3), (7, 3, 33), (200, 4, 64)):
        y = draw(dtype, tokens * heads, dim)
        v, gate = draw(dtype, tokens, heads * dim), draw(dtype, tokens, heads * dim)
        numbers = [draw(torch.float32, heads * dim) for _ in range(2)]
        yield y, *numbers, draw(torch.float32, tokens * heads, 1), v, gate
        yield y, *numbers, draw(torch.float32, tokens * heads, 1), slice_of_wider(v), slice_of_wider(gate)


def add_lora_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    """Adapters of ranks from 0 to that of the memory; tokens without one, and many tokens with the same one."""
    for tokens, ins, widths, rank in (
        (0, 16, (16,), 4),
        (1, 64, (96,), 16),
        (5, 33, (7, 1), 1),
        (17, 100, (40, 24, 24), 5),
        (70, 320, (1030, 48), 33),
        (130, 48, (16,), 8),
    ):
        slots = torch.randint(-1, 4, (tokens,))
        ranks = torch.tensor([rank, rank, max(rank - 3, 0), 0])
        a = draw(dtype, 4, len(widths), rank, ins) / ins**0.5
        b = draw(dtype, 4, rank, sum(widths)) / rank**0.5
        bounds = torch.tensor([0, *widths]).cumsum(0)
        out, x = draw(dtype, tokens, sum(widths)), draw(dtype, tokens, ins)
        yield out, x, a, b, slots, ranks, bounds
        yield slice_of_wider(out), slice_of_wider(x), a, b, slots.clamp(max=1), ranks, bounds
        yield out, x, a, b, torch.full_like(slots, -1), ranks, bounds


def sample_gumbel_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    if dtype is not torch.float32:
        return  # logits are always float32
    for rows in (0, 1, 5, 60):
        for vocab in (1, 3, 17, 31, 32, 33, 1000, 4097):
            yield draw(torch.float32, rows, vocab), *keys(rows)
    logits = draw(torch.float32, 50, 3000)
    yield logits.masked_fill(torch.rand(50, 3000) < 0.99, -torch.inf), *keys(50)
    yield logits[:, 100:1101], *keys(50)
    yield logits[:, :70].t(), *keys(70)
    yield draw(torch.float32, 2, 151_936), *keys(2)


def argmax_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, vocab in ((0, 5), (1, 1), (3, 15), (2, 16), (7, 33), (60, 1000), (1, 151_936), (3, 40_001)):
        logits = draw(dtype, rows, vocab)  # in bfloat16 many are equal
        yield (logits,)
        yield (slice_of_wider(logits),)
        yield (logits.masked_fill(torch.rand(rows, vocab) < 0.9, -torch.inf),)
        yield (torch.zeros(rows, vocab, dtype=dtype),)
    yield (torch.full((3, 20), -torch.inf, dtype=dtype),)
    yield (draw(dtype, 40, 9).t(),)


def keep_top_k_top_p_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    if dtype is not torch.float32:
        return  # logits are always float32
    for rows, vocab, scale in ((0, 10, 1), (1, 1, 1), (7, 17, 1), (40, 1000, 3), (9, 4097, 0.01), (9, 5000, 40)):
        logits = draw(torch.float32, rows, vocab) * scale
        some_k = torch.tensor([1, 2, 5, 50, 1000, vocab, vocab + 9])[torch.randint(0, 7, (rows,))]
        some_p = torch.tensor([1.0, 0.95, 0.5, 0.1, 1e-6])[torch.randint(0, 5, (rows,))]
        for k, p in ((some_k, None), (None, some_p), (some_k, some_p)):
            yield logits.clone(), k, p
            yield logits.masked_fill(torch.rand(rows, vocab) < 0.9, -torch.inf), k, p
    tied = torch.randint(0, 4, (12, 300)).float()
    yield tied, torch.arange(1, 13) * 20, None
    yield tied * 100, None, torch.linspace(0.05, 0.8971, 12)
    yield draw(torch.float32, 300, 8).t(), torch.full((8,), 7), None


def accept_or_resample_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for places, vocab in ((0, 5), (1, 1), (3, 15), (40, 33), (20, 1000), (3, 4097), (1, 20_001)):
        seeds, positions = keys(places)
        p = draw(torch.float32, places, vocab)
        near = (p + draw(torch.float32, places, vocab) / 4).to(dtype)
        far = draw(dtype, places, vocab)
        few = far.masked_fill(torch.rand(places, vocab) < 0.9, -torch.inf)
        for q in (near, far, few, slice_of_wider(far), far.t().contiguous().t(), torch.zeros_like(far), p.to(dtype)):
            drafts = OPS["sample_gumbel"].reference(q.float(), draft_seeds(seeds), positions)
            yield p, q, drafts, seeds, positions
            yield p.masked_fill(torch.rand(places, vocab) < 0.5, -torch.inf), q, drafts, seeds, positions
        yield torch.round(p), torch.round(far), drafts, seeds, positions  # many tokens have the same probability
        yield p, far, torch.full((places,), -1), seeds, positions
        for wrong in (torch.nan, torch.inf):
            damaged = far.clone()
            damaged[::2, vocab // 2] = wrong
            yield p, damaged, torch.randint(0, vocab, (places,)), seeds, positions
    nothing, drafts = torch.full((3, 40), -torch.inf), torch.tensor([5, -1, 0])
    yield draw(torch.float32, 3, 40), nothing, drafts, *keys(3)
    yield nothing, draw(torch.float32, 3, 40), drafts, *keys(3)


def row_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for rows, dim in ((0, 5), (1, 1), (3, 17), (60, 1000)):
        yield (draw(dtype, rows, dim),)
        yield (slice_of_wider(draw(dtype, rows, dim)),)
    yield (draw(dtype, 40, 9).t(),)


def keys(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 2**20, (rows,))


def token_masks(masks: int, vocab: int) -> Tensor:
    """Random masks with whole words that forbid or allow all of their tokens."""
    words = torch.randint(-(2**31), 2**31, (masks, -(-vocab // 32)), dtype=torch.int64).int()
    return torch.where(torch.rand(words.shape) < 0.5, words, -torch.randint(0, 2, words.shape).int())


def apply_token_masks_cases(dtype: torch.dtype) -> Iterator[Arguments]:
    for vocab in (1, 31, 32, 45, 320, 40_000):
        for places in ((), (0,), (4, 0, 2), (3, 1, 2, 0, 4)):
            yield draw(dtype, 5, vocab), torch.tensor(places, dtype=torch.int64), token_masks(len(places), vocab)
    yield slice_of_wider(draw(dtype, 5, 100)), torch.tensor([1, 3]), token_masks(2, 100)
    yield draw(dtype, 100, 3).t(), torch.tensor([2]), token_masks(1, 100)


CASES: dict[str, Callable[[torch.dtype], Iterator[Arguments]]] = {
    "rms_norm": rms_norm_cases,
    "add_rms_norm": add_rms_norm_cases,
    "layer_norm": layer_norm_cases,
    "add_layer_norm": add_layer_norm_cases,
    "add": add_cases,
    "silu_and_mul": gated_cases,
    "gelu_and_mul": gelu_and_mul_cases,
    "swiglu_oai": swiglu_oai_cases,
    "limited_swiglu": limited_swiglu_cases,
    "rotary_embedding": rotary_embedding_cases,
    "activate": activate_cases,
    "relu_and_mul": relu_and_mul_cases,
    "xielu": xielu_cases,
    "clip": clip_cases,
    "join": join_cases,
    "sharpen": sharpen_cases,
    "append_positions": append_positions_cases,
    "linear": linear_cases,
    "linear_by_head": linear_by_head_cases,
    "combine_experts": combine_experts_cases,
    "choose_experts": choose_experts_cases,
    "sort_by_expert": sort_by_expert_cases,
    "multiply": multiply_cases,
    "lerp": lerp_cases,
    "removal_keys": removal_keys_cases,
    "add_bonus": add_bonus_cases,
    "add_lora": add_lora_cases,
    "grouped_linear": grouped_linear_cases,
    "row_sums": row_cases,
    "log_softmax": row_cases,
    "argmax": argmax_cases,
    "sample_gumbel": sample_gumbel_cases,
    "keep_top_k_top_p": keep_top_k_top_p_cases,
    "apply_token_masks": apply_token_masks_cases,
    "accept_or_resample": accept_or_resample_cases,
}
IMPLEMENTATIONS = [(name, i) for name in CASES for i in for_cpus(name) if i.name != "reference"]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def dtypes(one_in: int) -> Any:
    """All types of tensors, float16 in a sample of the cases."""
    float16 = pytest.param(torch.float16, marks=pytest.mark.sampled(one_in))
    return pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, float16], ids=lambda dtype: str(dtype)[6:])


@dtypes(3)
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS, ids=[f"{n}-{i.name}" for n, i in IMPLEMENTATIONS])
def test_an_implementation_agrees_with_its_reference(name, implementation, dtype, two_threads):
    if not implementation.supports(Target(torch.device("cpu"), dtype)):
        pytest.skip("not supported here")
    torch.manual_seed(0)
    # One unit in the last place may differ where the float32 value lay next to the border between two roundings. gelu's
    # own rounding can make two of it: in the tail torch's erf and tanh have lost digits that ours has kept.
    rtol = 1e-5 if dtype is torch.float32 else 2**-6 if name == "gelu_and_mul" else 2**-7
    rtol = rtol / 4 if dtype is torch.float16 else rtol  # in two places where the reference rounds twice
    different = total = 0
    for arguments in CASES[name](dtype):
        wanted = OPS[name].reference(*map(copied, arguments))
        got = implementation.function(*map(copied, arguments))
        for a, b in zip(as_tuple(got), as_tuple(wanted), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            exact = not a.is_floating_point()
            torch.testing.assert_close(a, b, rtol=0 if exact else rtol, atol=0 if exact else 1e-5)
            different, total = different + int(((a - b).abs() > 1e-5 * (1 + b.abs())).sum()), total + a.numel()
    if dtype is not torch.float32 and "linear" not in name:
        assert different <= total * 1e-3, "rounds at other places than the reference does"


def copied(x: Any) -> Any:
    """x for a function that may overwrite it: the same values and strides in other memory."""
    if not isinstance(x, Tensor):
        return x
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((size,), (1,)).clone().as_strided(x.shape, x.stride())


def as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def check_packed_products(product: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Row counts around those that a kernel takes at once; outputs of one panel, of several and of a part of one."""
    rtol = 2**-7 if dtype is torch.bfloat16 else 2**-10
    for outer, inner in ((64, 256), (16, 2), (333, 70), (70, 33), (1, 1), (200, 2100)):
        weight, bias = draw(dtype, outer, inner) / 2, draw(dtype, outer)
        packed = product.pack(weight.clone())
        ids = torch.randint(0, outer, (20,))
        assert torch.equal(product.rows(packed, ids), weight[ids])
        for rows in (0, 1, 2, 5, 6, 7, 13, 300):
            x = draw(dtype, rows, inner) / inner**0.5
            wanted = x.double() @ weight.double().T + bias.double()
            made = product(x, packed, bias)
            torch.testing.assert_close(made.double(), wanted, rtol=rtol, atol=1e-5)
            torch.testing.assert_close(product(x, packed, None).double(), wanted - bias.double(), rtol=rtol, atol=1e-5)
            if rows > 1:  # a row's result does not depend on the others, not by a bit
                assert torch.equal(product(x[1:2], packed, bias), made[1:2])
                assert torch.equal(product(slice_of_wider(x), packed, bias), made)
                assert torch.equal(product(x.t().contiguous().t(), packed, bias), made)


@pytest.mark.parametrize("implementation", [i for i in for_cpus("linear") if hasattr(i.function, "pack")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_products_with_packed_weights(implementation, dtype, two_threads):
    if not implementation.supports(Target(torch.device("cpu"), dtype)):
        pytest.skip("not supported here")
    torch.manual_seed(0)
    check_packed_products(implementation.function, dtype)


def test_every_number_of_float16_is_read_and_rounded_as_torch_does():
    multiply = next(i for i in OPS["multiply"].implementations if i.name == "cpu")
    if not multiply.supports(Target(torch.device("cpu"), torch.float16)):
        pytest.skip("not supported here")
    check_float16(multiply.function)


def check_float16(multiply: Any) -> None:
    """multiply: the kernel. Products lie between numbers of float16, halfway, and beyond the smallest and largest."""
    numbers = torch.arange(2**16).to(torch.uint16).view(torch.float16)[None]
    for factor in (1.0, 0.5, 1.5, 1 + 2**-11, 1 - 2**-11, 3.7e-5, 2**-13, 11.0):
        made, wanted = multiply(numbers, factor), (numbers.float() * factor).half()
        assert torch.equal(made.isnan(), wanted.isnan())
        seen = ~wanted.isnan()
        assert torch.equal(made[seen].view(torch.int16), wanted[seen].view(torch.int16))


def test_every_op_has_cases():
    of_batches = {"flat_batch", "append_tokens", "count_kept"}
    elsewhere = {
        "quantize",
        "quantized_linear",
        "grouped_quantized_linear",
        "encoder_attention",
        "merge_partials",
        *of_batches,
        "causal_conv",
        "time_steps",
        "bounded_decays",
        "scan",
        "selective_scan",
        "gated_norm",
        "round_rows",
        "add_rms_norm_rounded",
        "silu_and_mul_rounded",
    }
    assert {*CASES, *elsewhere} == set(OPS)


def test_a_norm_returns_contiguous_memory():
    kernels = Kernels(Target(torch.device("cpu"), torch.float32))
    assert kernels.rms_norm(torch.randn(3, 64)[:, 8:40], torch.ones(32), 1e-6).is_contiguous()


def test_pairs_side_by_side_rotate_as_complex_numbers():
    q, k, angle = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 6) * 10
    turn = torch.polar(torch.full_like(angle, 0.7), angle)[:, None]
    rotated = OPS["rotary_embedding"].reference(q, k, turn.real[:, 0], turn.imag[:, 0], True)
    for got, x in zip(rotated, (q, k), strict=True):
        pairs = torch.view_as_complex(x[..., :12].unflatten(-1, (6, 2)).contiguous())
        wanted = torch.cat([torch.view_as_real(pairs * turn).flatten(-2), x[..., 12:]], dim=-1)
        torch.testing.assert_close(got, wanted)


def test_norms_with_a_float32_weight_are_those_of_olmo_and_gemma():
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    x, weight = draw(torch.bfloat16, 50, 64), torch.randn(64)
    for module, added in ((Olmo2RMSNorm(64, 1e-6), 0.0), (Gemma2RMSNorm(64, 1e-6), 1.0)):
        module.weight.data = weight.clone()
        assert torch.equal(OPS["rms_norm"].reference(x, weight + added, 1e-6), module(x))


def test_limited_activations_are_those_of_transformers():
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    gate_up = torch.randn(20, 64) * 6
    layer = SimpleNamespace(act_fn=torch.nn.functional.silu, limit=2.0, swiglu_limit=2.0)
    for experts, after in ((HYV4Experts, False), (Step3p7Experts, True)):
        wanted = experts._apply_gate(layer, gate_up)
        torch.testing.assert_close(OPS["limited_swiglu"].reference(gate_up, 2.0, after), wanted)


def test_the_gated_activation_of_gpt_oss_is_that_of_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    gate, up = torch.randn(20, 32) * 6, torch.randn(20, 32) * 6
    wanted = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), torch.stack([gate, up], -1).flatten(1))
    torch.testing.assert_close(OPS["swiglu_oai"].reference(torch.cat([gate, up], dim=1)), wanted)


def test_philox_gives_the_words_that_its_authors_publish():
    """The known-answer vectors that come with Random123 (kat_vectors, philox4x32 with 10 rounds)."""
    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, words in vectors:
        got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(int(w) for w in got) == words


@pytest.mark.parametrize("implementation", for_cpus("sample_gumbel"), ids=lambda i: i.name)
class TestSampleGumbel:
    @pytest.fixture(autouse=True)
    def supported(self, implementation):
        if not implementation.supports(Target(torch.device("cpu"), torch.float32)):
            pytest.skip("not supported here")

    def test_draws_follow_the_distribution(self, implementation):
        logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf, 0.5, -3.0])
        draws = 40_000
        seeds, positions = torch.arange(draws) // 200 * 2**33 + 7, torch.arange(draws) % 200
        counts = implementation.function(logits.expand(draws, -1), seeds, positions).bincount(minlength=7)
        expected = logits.softmax(0) * draws
        assert counts[4] == 0
        seen = expected > 0
        chi_square = float(((counts - expected).square() / expected)[seen].sum())
        assert chi_square < 22.5  # the 0.1 % quantile at 5 degrees of freedom is 20.5

    def test_a_row_depends_on_nothing_but_itself(self, implementation):
        logits, (seeds, positions) = torch.randn(9, 5000), keys(9)
        together = implementation.function(logits, seeds, positions)
        alone = [implementation.function(logits[r : r + 1], seeds[r : r + 1], positions[r : r + 1]) for r in range(9)]
        assert together.tolist() == torch.cat(alone).tolist()

    def test_only_one_allowed_token_is_drawn(self, implementation):
        logits = torch.full((3, 300), -torch.inf)
        allowed = torch.tensor([0, 17, 299])
        logits[torch.arange(3), allowed] = -50.0
        assert implementation.function(logits, *keys(3)).tolist() == allowed.tolist()

    def test_no_noise_is_infinite(self, implementation):
        """The largest word rounds up to u = 1 in float32; the token that gets it must not win against everything."""
        seed, position, token = 0, 1229, 2648
        logits = torch.zeros(1, token + 4)
        logits[0, 0] = 100.0
        assert implementation.function(logits, torch.tensor([seed]), torch.tensor([position])).tolist() == [0]


def test_the_noise_of_the_reference_is_standard_gumbel():
    noise = gumbel_noise(*keys(64), 5000).double()
    assert abs(float(noise.mean()) - 0.57722) < 0.01
    assert abs(float(noise.var()) - torch.pi**2 / 6) < 0.02
