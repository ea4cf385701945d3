"""Blocks that several layers share (Zamba2): a layer's own low-rank products of queries, keys and values."""

from __future__ import annotations

from support.checkpoints import ALL_VARIANTS, write_checkpoint
from support.engines import make_llm, teacher_forced_logits
from support.reference import load, logits


def test_each_layer_adds_its_own_products_to_those_of_the_attention_it_shares(tmp_path):
    """The products are large in such a checkpoint, so attention is sharp and float32 rounds visibly: transformers is
    4e-3 from itself in float64. Without the products, or with those of another layer, the logits differ by more than
    their standard deviation."""
    kind, config, _ = ALL_VARIANTS["zamba2"]
    write_checkpoint(tmp_path, kind, {**config, "use_shared_attention_adapter": True})
    text = list(range(10, 40))
    expected = logits(load(tmp_path), text)
    difference = (teacher_forced_logits(make_llm(tmp_path), text) - expected).abs().max()
    assert difference < 0.05 * expected.std()
