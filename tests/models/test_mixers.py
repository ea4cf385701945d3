"""Layers of one model mix tokens in different ways, and keep entries of different shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kvcache.specs import FullAttentionSpec, LatentSpec
from quire.models.architectures.deepseek import deepseek
from quire.models.architectures.llama import llama
from quire.models.registry import ARCHITECTURES
from quire.models.spec import DecoderSpec
from support.checkpoints import build, write_checkpoint
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.reference import greedy, logits, prompts

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "max_position_embeddings": 256}
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
    """A Llama whose layer 1 has the latent attention of DeepSeek, and whose layer 2 has more KV heads than the others:
    transformers' network, put together from three of its models, and a checkpoint of it."""
    network = build("llama", {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16})
    wider = build("llama", {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}, 1)
    latent = build("deepseek_v3", LATENT, 2)
    for model in (network, wider, latent):
        model.set_attn_implementation("eager")
    network.model.layers[1].self_attn = latent.model.layers[1].self_attn
    network.model.layers[2].self_attn = wider.model.layers[2].self_attn

    def mixture(config: Any) -> DecoderSpec:
        spec = llama(config)
        kinds = {1: deepseek(config["latent"]).mixers[1], 2: llama(config["wider"]).mixers[2]}
        names = {**deepseek(config["latent"]).names, **spec.names}
        return replace(spec, mixers=tuple(kinds.get(i, m) for i, m in enumerate(spec.mixers)), names=names)

    monkeypatch.setitem(ARCHITECTURES, "MixtureForCausalLM", mixture)
    third = {"architectures": ["DeepseekV3ForCausalLM"]}
    parts = {"latent": {**latent.config.to_dict(), **third}, "wider": wider.config.to_dict()}
    adds = {"architectures": ["MixtureForCausalLM"], **parts}
    return network, write_checkpoint(tmp_path, "llama", network=network, adds=adds)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_of_three_kinds_of_attention_layers_equals_transformers(tmp_path, monkeypatch, backend):
    network, path = mixed(tmp_path, monkeypatch)
    llm = make_llm(path, backend, max_num_batched_tokens=48)
    kept = {spec.layers: type(spec) for spec in runner_of(llm).model.kv_specs}
    assert kept == {(0,): FullAttentionSpec, (1,): LatentSpec, (2,): FullAttentionSpec, (3,): FullAttentionSpec}
    backends = dict(zip(kept, runner_of(llm).forward.backends, strict=True))
    assert backends[0,] is backends[3,], "layers of one shape share a backend"
    entries = {backend.entry_bytes() for backend in backends.values()}
    assert len(entries) == 3
    assert llm.core.executor.kv_cache.block_bytes == max(entries)
    expected = greedy(network, prompts(320, 9))
    for _ in range(2):  # the second time with the prompts' blocks in the cache
        made = tokens_of(generate(llm, [c.prompt for c in expected]))
        for continuation, token_ids in zip(expected, made, strict=True):
            continuation.check(token_ids)
    text = expected[-1].prompt + expected[-1].token_ids
    right = logits(network, text)
    assert (teacher_forced_logits(llm, text, [30, len(text) - 31, 1]) - right).abs().max() / right.std() < 5e-5
