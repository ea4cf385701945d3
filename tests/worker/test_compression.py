"""Compressed prompts in the worker, against transformers with a mask for each head and a choice in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.attention.eviction import METHODS
from quire.config.kv_compression import KVCompressionOptions
from support.checkpoints import Checkpoints
from support.compression import BLOCK_SIZE, MaskedModel, compressed_logits, kept_tokens, key_scores
from support.engines import make_llm, runner_of
from support.reference import References

pytestmark = pytest.mark.texts

VARIANT = "llama-gqa2-tied-llama3"
NUM_PROMPT = 150
FIELDS = {"window": 12, "sinks": 2}


def text_of(vocab_size: int, length: int = 170) -> list[int]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(4, vocab_size, (length,), generator=draw).tolist()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("method", METHODS)
def test_logits_behind_a_compressed_prompt_are_those_with_a_mask_for_each_head(
    checkpoints: Checkpoints, references: References, method: str, backend: str
):
    options = KVCompressionOptions.read({"method": method, "ratio": 2, **FIELDS})
    num_blocks = options.kept_blocks(NUM_PROMPT, BLOCK_SIZE)
    assert num_blocks == 4
    text = text_of(333)
    masked = MaskedModel(references.model(VARIANT))
    plain = masked.logits(text)
    masked.compress(options, text[:NUM_PROMPT], num_blocks)
    expected = masked.logits(text)
    assert not torch.allclose(expected[NUM_PROMPT:], plain[NUM_PROMPT:], atol=0.1), "compression changes something"
    given = {"method": method, **FIELDS}
    llm = make_llm(checkpoints.path(VARIANT), backend, kv_compression=given)
    for chunks in ([NUM_PROMPT, *[1] * 20], [100, 50, 1, 13, 6]):
        found = compressed_logits(runner_of(llm), text, NUM_PROMPT, num_blocks, chunks)
        assert (found - expected).abs().max() < 2e-4 * expected.std()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("method", METHODS)
def test_the_kept_tokens_are_those_of_a_choice_in_plain_loops(method: str, pooling: str):
    fields: dict[str, Any] = {"method": method, "pooling": pooling, "window": 20, "kernel_size": 3, "steepness": 4}
    options = KVCompressionOptions.read({**fields, "safeguard": 0.5})
    layers, heads, kv_heads, tokens, dim, num_blocks = 4, 6, 2, 165, 8, 3
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(layers, heads, tokens, dim, generator=draw) * 2
    k = torch.randn(layers, kv_heads, tokens, dim, generator=draw)
    eviction = METHODS[method](options, BLOCK_SIZE)
    scores = [
        eviction.scores(x[:, -20:].transpose(0, 1), y.transpose(0, 1), torch.zeros(kv_heads), dim**-0.5, None)
        for x, y in zip(q, k, strict=True)
    ]
    counts, kept = eviction.choose(torch.stack(scores), tokens, num_blocks)
    assert counts.sum() == layers * kv_heads * num_blocks
    expected = kept_tokens(options, [key_scores(options, x, y) for x, y in zip(q, k, strict=True)], num_blocks)
    for layer, heads_kept in enumerate(expected):
        for head, tokens_kept in enumerate(heads_kept):
            assert kept[layer, head, : len(tokens_kept)].tolist() == tokens_kept
    assert [[len(e) // BLOCK_SIZE for e in layer] for layer in expected] == counts.tolist()
