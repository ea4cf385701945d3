"""Layers of one model mix tokens in different ways, and keep entries of different shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kv.specs import FullAttentionSpec, LatentSpec
from quire.models.architectures.deepseek import deepseek
from quire.models.architectures.llama import llama
from quire.models.registry import ARCHITECTURES
from quire.models.spec import DecoderSpec
from support.checkpoints import build, write_checkpoint
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.reference import greedy, logits, prompts

pytestmark = pytest.mark.texts

SIZES: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "max_position_embeddings": 256}
LATENT = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
}


def mixed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A Llama in whose layers 1 and 4 there is the latent attention of DeepSeek, and in whose layers 2 and 5 there are
    more KV heads: transformers' network, put together from three of its models, and a checkpoint of it."""
    network = build("llama", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16})
    wider = build("llama", {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}, 1)
    latent = build("deepseek_v3", LATENT, 2)
    for model in (network, wider, latent):
        model.set_attn_implementation("eager")
    for layer, other in ((1, latent), (2, wider), (4, latent), (5, wider)):
        network.model.layers[layer].self_attn = other.model.layers[layer].self_attn

    def mixture(config: Any) -> DecoderSpec:
        spec = llama(config)
        by_turns = (spec, deepseek(config["latent"]), llama(config["wider"]))
        names = {**deepseek(config["latent"]).names, **spec.names}
        return replace(spec, mixers=tuple(by_turns[i % 3].mixers[i] for i in range(spec.num_layers)), names=names)

    monkeypatch.setitem(ARCHITECTURES, "MixtureForCausalLM", mixture)
    third = {"architectures": ["DeepseekV3ForCausalLM"]}
    parts = {"latent": {**latent.config.to_dict(), **third}, "wider": wider.config.to_dict()}
    adds = {"architectures": ["MixtureForCausalLM"], **parts}
    return network, write_checkpoint(tmp_path, "llama", network=network, adds=adds)


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_of_three_kinds_of_attention_layers_equals_transformers(tmp_path, monkeypatch, backend):
    network, path = mixed(tmp_path, monkeypatch)
    llm = make_llm(path, backend, max_num_batched_tokens=48)
    kept = {spec.layers: type(spec) for spec in runner_of(llm).model.kv_specs}
    assert kept == {(0, 3): FullAttentionSpec, (1, 4): LatentSpec, (2, 5): FullAttentionSpec}
    entries = {backend.entry_bytes() for backend in runner_of(llm).forward.backends}
    assert len(entries) == 3
    if llm.config.scheduler.speculation is None:  # a drafter would have entries of its own
        assert sum(llm.core.executor.kv_cache.rank_bytes) == 2 * max(entries)
    expected = greedy(network, prompts(320, 9))
    for _ in range(2):  # the second time with the prompts' blocks in the cache
        made = tokens_of(generate(llm, [c.prompt for c in expected]))
        for continuation, token_ids in zip(expected, made, strict=True):
            continuation.check(token_ids)
    text = expected[-1].prompt + expected[-1].token_ids
    right = logits(network, text)
    assert (
        teacher_forced_logits(llm, text, [30, len(text) - 31, 1]) - right
    ).abs().max() / right.std() < 5e-4  # mixed at random, the layers enlarge rounding errors
