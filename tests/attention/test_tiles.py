"""The tiles of the attention kernel fit the cards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch

from quire.attention.base import AttentionShape
from quire.attention.tiles import choose_tiles
from quire.platform.gpu.cards import CARDS
from support.stand_in import run_on_stand_in

SHAPE = AttentionShape(16, 1, 128, 16, torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_size_of_heads_has_tiles_on_every_card(card, dtype, cell):
    for head_dim in (8, 64, 80, 128, 136, 256, 576):
        tiles = choose_tiles(card, replace(SHAPE, head_dim=head_dim, dtype=dtype, cell=cell))
        for tile in (tiles.few, tiles.many):
            assert min(tile.rows, tile.keys) >= 16, "tensor cores multiply no fewer"


@pytest.mark.sampled(4)
@pytest.mark.nightly
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_latent_caches_and_large_heads_with_soft_caps_break_no_rule(card):
    printed = run_on_stand_in(
        """
        import json, torch
        from benchmarks.gpu.rules import judged
        from quire.attention.base import AttentionShape, StepLayout
        from quire.attention.triton.attention_backend import TritonAttention
        gpu = torch.device("cuda", 0)
        i32 = dict(dtype=torch.int32, device=gpu)
        for heads, kv_heads, dim, value_dim, soft_cap in ((16, 1, 576, 512, None), (16, 8, 256, None, 50.0)):
            for tokens, each in ((64, 1), (4096, 0)):
                backend = TritonAttention(AttentionShape(heads, kv_heads, dim, 16, torch.bfloat16, gpu, value_dim))
                cache = backend.view(torch.empty(9, 3 * backend.entry_bytes(), dtype=torch.uint8, device=gpu), 1)
                layout = StepLayout(torch.empty(65, **i32), torch.empty(64, **i32), torch.empty(tokens, **i32).long(),
                                    torch.empty(64, 256, **i32), tokens_per_request=each)
                q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=gpu)
                with device.traced() as launches:
                    backend.attend(q, cache, backend.plan(layout), scale=0.1, soft_cap=soft_cap)
                for launch in launches:
                    if launch.kernel is not None:
                        print(json.dumps([dim, tokens, judged(launch, device.card)["broken"]]))
        """,
        card,
    )
    assert [line for line in map(json.loads, printed.splitlines()) if line[2]] == []
