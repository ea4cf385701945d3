"""What the parity tests are worth: an engine that is wrong in one detail must fail them, by far.

Each mutation is applied to the spec before the model is built, or to the layers after it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity import BOUND
from torch import Tensor

from quire.models import load
from quire.models.decoder import Decoder
from quire.models.spec import DecoderSpec
from support.engines import generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.reference import LENGTHS, logits

SpecMutation = Callable[[DecoderSpec], DecoderSpec]
ModelMutation = Callable[[Decoder], None]


def theta(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, rotary=replace(spec.rotary, theta=spec.rotary.theta * 1.1))


def no_rope_scaling(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, rotary=replace(spec.rotary, scaling={}))


def another_rope_factor(spec: DecoderSpec) -> DecoderSpec:
    scaling = {**spec.rotary.scaling, "factor": spec.rotary.scaling["factor"] * 1.1}
    return replace(spec, rotary=replace(spec.rotary, scaling=scaling))


def another_original_length(spec: DecoderSpec) -> DecoderSpec:
    scaling = {**spec.rotary.scaling, "original_max_position_embeddings": 40}
    return replace(spec, rotary=replace(spec.rotary, scaling=scaling))


def no_windows(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=(None,) * spec.num_layers)


def windows_everywhere(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=(max(w for w in spec.windows if w),) * spec.num_layers)


def windows_in_other_layers(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=spec.windows[::-1])


def wider_window(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=tuple(None if w is None else w + 1 for w in spec.windows))


def narrower_window(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=tuple(None if w is None else w - 1 for w in spec.windows))


def larger_epsilon(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, norm_eps=spec.norm_eps * 1000)


def norms_exchanged(spec: DecoderSpec) -> DecoderSpec:
    names = dict(spec.names)
    names["attention_norm"], names["mlp_norm"] = names["mlp_norm"], names["attention_norm"]
    return replace(spec, names=names)


def keys_and_queries_norms_exchanged(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, names={**spec.names, "q_norm": spec.names["k_norm"], "k_norm": spec.names["q_norm"]})


def gate_and_up_exchanged(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, names={**spec.names, "gate": spec.names["up"], "up": spec.names["gate"]})


def no_qkv_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.qkv.bias.zero_()


def no_value_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.qkv.bias[-layer.attention.num_kv_heads * layer.attention.head_dim :].zero_()


def no_output_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.out.bias.zero_()


def no_mlp_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.mlp.down.bias.zero_()
        layer.mlp.gate_up.bias.zero_()


def no_qk_norm(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.q_norm = layer.attention.k_norm = None


def qk_norm_after_rotary(model: Decoder) -> None:
    for layer in model.layers:
        attention = layer.attention
        q_norm, k_norm, rotate = attention.q_norm, attention.k_norm, attention.rotary_embedding
        attention.q_norm = attention.k_norm = None

        def rotate_then_norm(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm=q_norm, k_norm=k_norm, rotate=rotate
        ) -> tuple[Tensor, Tensor]:
            q, k = rotate(q, k, cos, sin)
            return q_norm(q), k_norm(k)

        attention.rotary_embedding = rotate_then_norm


def interleaved_rotary(model: Decoder) -> None:
    """Pairs (2i, 2i + 1), as GPT-J has them, in place of (i, i + half)."""

    def apart(x: Tensor) -> Tensor:
        return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)

    def together(x: Tensor) -> Tensor:
        return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)

    for layer in model.layers:
        rotate = layer.attention.rotary_embedding

        def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotate=rotate) -> tuple[Tensor, Tensor]:
            q, k = rotate(apart(q), apart(k), cos, sin)
            return together(q), together(k)

        layer.attention.rotary_embedding = interleaved


def no_rotary(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.rotary_embedding = lambda q, k, cos, sin: (q, k)


def positions_from_one(model: Decoder) -> None:
    """Only relative positions count in attention, so this one must change nothing: the opposite of a mutation."""
    rotary = model.rotary
    model.rotary = lambda positions: rotary(positions + 1)  # type: ignore[assignment]


def another_scale(model: Decoder) -> None:
    for layer in model.layers:
        layer.attention.scale *= 1.01


def heads_in_another_order(model: Decoder) -> None:
    """Query heads dealt out to the KV heads in turn, in place of neighbours sharing one."""
    for layer in model.layers:
        a = layer.attention
        queries = a.qkv.weight[: a.num_heads * a.head_dim].view(a.num_heads, a.head_dim, -1)  # a view
        order = torch.arange(a.num_heads).view(-1, a.num_kv_heads).T.flatten()
        queries.copy_(queries[order])


def tied(model: Decoder) -> None:
    model.lm_head.weight = model.embedding.weight


def untied(model: Decoder) -> None:
    model.lm_head.weight = (
        torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) * model.lm_head.weight.std()
    )


def no_final_norm_weight(model: Decoder) -> None:
    model.final_norm.weight.fill_(1)


SPEC_MUTATIONS: list[tuple[SpecMutation, str]] = [
    (theta, "llama"),
    (theta, "qwen3"),
    (no_rope_scaling, "llama-gqa2-tied-llama3"),
    (no_rope_scaling, "llama-biases-linear-old"),
    (another_rope_factor, "llama-gqa4-llama3-old"),
    (another_rope_factor, "llama-mqa-linear"),
    (another_original_length, "llama-gqa4-llama3-old"),
    (no_windows, "mistral-window-20"),
    (no_windows, "qwen2-windows-old"),
    (windows_everywhere, "qwen2-windows-old"),
    (windows_everywhere, "qwen3-mixed-windows-biases"),
    (windows_in_other_layers, "qwen2-windows-in-upper-layers"),
    (windows_in_other_layers, "qwen3-mixed-windows-biases"),
    (wider_window, "mistral-window-20"),
    (wider_window, "qwen2-windows-in-upper-layers"),
    (narrower_window, "mistral-window-32-tied"),
    (narrower_window, "qwen3-mixed-windows-biases"),
    (larger_epsilon, "llama"),
    (larger_epsilon, "qwen3"),
    (norms_exchanged, "llama"),
    (keys_and_queries_norms_exchanged, "qwen3"),
    (gate_and_up_exchanged, "mistral-no-window"),
]
MODEL_MUTATIONS: list[tuple[ModelMutation, str]] = [
    (no_qkv_bias, "qwen2"),
    (no_value_bias, "qwen2"),
    (no_qkv_bias, "llama-biases-linear-old"),
    (no_output_bias, "llama-biases-linear-old"),
    (no_output_bias, "qwen3-mixed-windows-biases"),
    (no_mlp_bias, "llama-biases-linear-old"),
    (no_qk_norm, "qwen3"),
    (qk_norm_after_rotary, "qwen3"),
    (interleaved_rotary, "llama"),
    (interleaved_rotary, "llama-mqa-linear"),
    (no_rotary, "llama"),
    (another_scale, "llama-6-heads-over-2"),
    (heads_in_another_order, "llama-6-heads-over-2"),
    (tied, "llama"),
    (untied, "qwen2"),
    (no_final_norm_weight, "mistral-no-window"),
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", value)


def wrongness(references: Any, variant: str, llm: Any) -> float:
    """How far the logits are from transformers', in multiples of what the parity test allows."""
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    expected = logits(references.model(variant), text)
    return float((teacher_forced_logits(llm, text) - expected).abs().max() / expected.std() / BOUND)


def assert_other_tokens(references: Any, variant: str, llm: Any) -> None:
    """Of the batch's continuations, at least one goes another way."""
    expected = references.continuations(variant)
    made = tokens_of(generate(llm, [c.prompt for c in expected]))
    assert any(m[: c.certain] != c.token_ids[: c.certain] for m, c in zip(made, expected, strict=True))


@pytest.mark.parametrize(("mutate", "variant"), SPEC_MUTATIONS, ids=name_of)
def test_a_wrong_spec_is_found_out(checkpoints, references, monkeypatch, mutate, variant):
    spec_of = load.spec_of
    monkeypatch.setattr(load, "spec_of", lambda config: mutate(spec_of(config)))
    llm = make_llm(checkpoints.path(variant))
    assert wrongness(references, variant, llm) > 20
    assert_other_tokens(references, variant, llm)


@pytest.mark.parametrize(("mutate", "variant"), MODEL_MUTATIONS, ids=name_of)
def test_a_wrong_layer_is_found_out(checkpoints, references, mutate, variant):
    llm = make_llm(checkpoints.path(variant))
    assert wrongness(references, variant, llm) < 1
    mutate(runner_of(llm).model)
    assert wrongness(references, variant, llm) > 20
    assert_other_tokens(references, variant, llm)


def test_only_relative_positions_count(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"))
    positions_from_one(runner_of(llm).model)
    assert wrongness(references, "llama", llm) < 10  # rounding
