"""The Triton backend, on a GPU or under Triton's interpreter, against attention that knows nothing of pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention import BFLOAT16, CELLS, FLOAT32, Kept, World, build
from attention.test_prepare import both_ways

from quire.attention.triton.attention_backend import TritonAttention
from quire.ops import Kernels
from quire.ops.registry import Target

pytestmark = pytest.mark.usefixtures("interpreter")

ROUNDING = 2**-7
FLOAT16 = [Kept(torch.float16, cell) for cell in (None, torch.int8, torch.float8_e4m3fn)]
KINDS = [FLOAT32, BFLOAT16, *FLOAT16, *CELLS]
MIXED = [(0, 1), (17, 1), (0, 20), (33, 5)]  # (cached, new) tokens
DECODE = [(0, 1), (15, 1), (16, 1), (70, 1)]
# For what does not depend on lengths: the interpreter needs milliseconds for each token that is stored.
SHORT_MIXED = [(0, 1), (15, 6)]
SHORT_DECODE = [(3, 1), (36, 1)]


def sampled(*values: object, **options: str) -> object:
    return pytest.param(*values, marks=pytest.mark.sampled(8), **options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("requests", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [sampled(2, 2, 64, 16), (6, 2, 80, 16), sampled(8, 1, 128, 32), sampled(3, 3, 24, 16)],
)
def test_shapes(heads, kv_heads, dim, block, requests):
    World(build(TritonAttention, heads, kv_heads, dim, block, FLOAT32), requests).check()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("window", "soft_cap", "far"), [(None, None, 1), (16, None, 40), (None, 3.0, 128)])
@pytest.mark.parametrize("requests", [SHORT_MIXED, SHORT_DECODE], ids=["mixed", "decode"])
def test_biases_by_distance(requests, window, soft_cap, far):
    bias = 2 * torch.randn(6, 2 * far + 1, generator=torch.Generator().manual_seed(far))
    sinks = torch.linspace(-3, 4, 6) if far == 40 else None
    World(build(TritonAttention, 6, 2, 40, 16, FLOAT32), requests).check(
        window, soft_cap=soft_cap, sinks=sinks, bias=bias
    )


@pytest.mark.sampled(18)
@pytest.mark.parametrize("requests", [SHORT_MIXED, SHORT_DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("kept", KINDS, ids=str)
def test_types(kept, requests):
    world = World(build(TritonAttention, 4, 2, 64, 16, kept), requests)
    world.check(tolerance=ROUNDING if kept.dtype is torch.bfloat16 else None)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("requests", [MIXED, sampled(DECODE)], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "how", [{"window": 9}, {"soft_cap": 3.0}, {"sinks": True}, {"window": 20, "sinks": True}], ids=str
)
def test_windows_soft_caps_and_sinks(how, requests):
    sinks = torch.linspace(-2, 3, 4) if how.get("sinks") else None
    World(build(TritonAttention, 4, 2, 32, 16, FLOAT32), requests).check(**{**how, "sinks": sinks})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("requests", [MIXED, sampled(DECODE)], ids=["mixed", "decode"])
@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (576, 512), (24, 24), (33, 17)])
def test_latent_caches(dim, value_dim, requests):
    World(build(TritonAttention, 4, 1, dim, 16, FLOAT32, value_dim), requests).check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("requests", [SHORT_MIXED, SHORT_DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("kept", [CELLS[0], sampled(CELLS[1])], ids=str)
def test_latent_caches_of_cells(kept, requests):
    World(build(TritonAttention, 4, 1, 48, 16, kept, 32), requests).check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("requests", [sampled(MIXED), DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("heads", [71])
def test_the_heads_of_a_group_are_spread_over_tiles(heads, requests):
    World(build(TritonAttention, heads, 1, 24, 16, FLOAT32), requests).check(window=30)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [sampled(None), 40])
def test_block_sizes_that_tiles_do_not_fit(window):
    World(build(TritonAttention, 4, 2, 24, 48, FLOAT32), [(100, 1), (0, 50), (40, 33)]).check(window)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [sampled(5), 100])
def test_windows_of_long_prompts(window):
    """Tiles of keys that only some rows see are on both ends of tiles that all rows see."""
    World(build(TritonAttention, 2, 1, 16, 16, FLOAT32), [(150, 70), (0, 200)]).check(window)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("new", [sampled(1), 3])
def test_parts_of_the_keys_are_merged(new):
    """Decoding steps, with drafts and without, on a chip with many processors."""
    backend = build(TritonAttention, 4, 2, 32, 16, FLOAT32)
    backend._card = replace(backend._card, processors=6)
    world = World(backend, [(0, new), (380, new)])
    assert backend.plan(world.layout(world.requests)).work[0, :2].tolist() == [3, 1]
    world.check()
    world.check(window=40, sinks=torch.linspace(-1, 1, 4))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kept", "options"), [sampled(FLOAT32, {}), (BFLOAT16, {"window": 40}), sampled(CELLS[1], {})], ids=str
)
def test_a_result_does_not_depend_on_the_batch_if_that_is_asked_for(kept, options):
    """The last token of a request: as a step of its own, among others that decode, and at the end of its prompt."""
    backend = build(TritonAttention, 2, 1, 32, 16, kept)
    backend = TritonAttention(replace(backend.shape, batch_invariant=True))
    world = World(backend, [(150, 20), (90, 1), (3, 1), (0, 70)])

    def last(requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        layout = world.layout([(length - new, new) for length, new in requests])
        q = torch.cat([q[len(q) - new :] for q, (_, new) in zip(world.q, requests, strict=False)])
        out, lse = backend.attend(q, world.cache, backend.plan(layout), scale=0.2, **options)
        return out[requests[0][1] - 1], lse[requests[0][1] - 1]

    alone = last([(170, 1)])
    for requests in ([(170, 1), (91, 1), (4, 1)], [(170, 20)], [(170, 3), (91, 1), (4, 1), (70, 50)]):
        for made, wanted in zip(last(requests), alone, strict=True):
            assert torch.equal(made, wanted)


def test_a_plan_can_be_overwritten_by_another_step():
    backend = build(TritonAttention, 4, 2, 32, 16, FLOAT32)
    first, then = World(backend, [(5, 1), (60, 1)]), World(backend, [(33, 1), (12, 1)], seed=1)
    plan = backend.plan(first.layout(first.requests))
    wanted = backend.attend(torch.cat(then.q), then.cache, backend.plan(then.layout(then.requests)), scale=0.2)
    made = backend.attend(torch.cat(then.q), then.cache, backend.plan(then.layout(then.requests), plan), scale=0.2)
    assert torch.equal(made[0], wanted[0])
    assert torch.equal(made[1], wanted[1])


NORMS = ["model's type", "float32", None]
ROTARIES = ["halves", "pairs", "part", None]


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("kept", "rotary", "norm"),
    # Every pair of two of the three.
    [(kept, rotary, NORMS[(i + j) % 3]) for i, kept in enumerate(KINDS) for j, rotary in enumerate(ROTARIES)],
    ids=str,
)
def test_preparing_in_one_pass(kept, rotary, norm):
    world = World(build(TritonAttention, 4, 2, 48, 16, kept), [(14, 3), (0, 1)])
    pinned = dict.fromkeys(("rms_norm", "rotary_embedding"), "reference")
    kernels = Kernels(Target(torch.device("cpu"), kept.dtype), pinned)
    tolerance = 1e-5 if kept.dtype is torch.float32 else ROUNDING
    for made, wanted in both_ways(world, kernels, norm, rotary):
        if made.dtype is not torch.uint8:  # a cell may be the next one
            torch.testing.assert_close(made, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
