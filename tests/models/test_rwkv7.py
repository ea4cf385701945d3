"""RWKV-7: formats of its checkpoints, what it refuses, and the reference against its authors' package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models.registry import spec_of
from support.checkpoints import build, write_checkpoint
from support.engines import GREEDY, generate, make_llm, runner_of, teacher_forced_logits, tokens_of
from support.reference import logits

TEXT = [(i * 37 + 11) % 300 + 4 for i in range(70)]
CONFIG = {
    "architectures": ["RWKV7ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "head_dim": 64,
}


def test_the_first_format_packs_the_mixes_of_a_layer(checkpoints, tmp_path):
    packed = write_checkpoint(tmp_path, "rwkv7", hub_layout=True)
    made, expected = (teacher_forced_logits(make_llm(path), TEXT) for path in (packed, checkpoints.path("rwkv7")))
    assert torch.equal(made, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recorded_steps_say_what_others_do(checkpoints, dtype):
    path, prompts = checkpoints.path("rwkv7"), [TEXT[: 1 + 9 * i] for i in range(5)]
    params = [GREEDY.clone(max_tokens=12 + 5 * i) for i in range(5)]
    llm, eager = make_llm(path, dtype=dtype), make_llm(path, dtype=dtype, enforce_eager=True)
    for _ in range(2):  # the second time, nothing is recorded anew
        assert tokens_of(generate(llm, prompts, params)) == tokens_of(generate(eager, prompts, params))
    assert {size.tokens for size in runner_of(llm).forward._recorded} == {1, 2, 3, 4, 5}
    whole = teacher_forced_logits(eager, TEXT)
    assert torch.equal(teacher_forced_logits(llm, TEXT, [60, *[1] * 10]), whole)


def test_a_config_without_ranks_and_widths_has_those_that_follow_from_its_size():
    """By the rules of flash-linear-attention."""
    first, second = spec_of({**CONFIG, "intermediate_size": None, "value_dim": [2048, 2048]}).mixers
    assert (second.decay_rank, second.rate_rank, second.gate_rank, second.value_rank) == (128, 128, 224, 64)
    assert first.value_rank == 0
    assert spec_of(CONFIG).mlps[0].intermediate_size == 8192


@pytest.mark.parametrize(
    ("field", "named"),
    [({"attn": {"layers": [1], "num_heads": 4}}, "'attn'"), ({"value_dim": [2048, 4096]}, "value_dim")],
)
def test_layers_of_attention_and_wider_values_are_refused(field, named):
    with pytest.raises(ValueError, match=named):
        spec_of({**CONFIG, **field})


_PARTS = {
    "r_proj": "receptance",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "g_norm": "ln_x",
    "attn": "att",
    "pre_norm": "ln0",
    "attn_norm": "ln1",
    "ffn_norm": "ln2",
}
_ENDS = {
    "model.embeddings.weight": "emb.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "ln_out.weight",
    "model.norm.bias": "ln_out.bias",
}


def authors_format(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if name in _ENDS:
            made[_ENDS[name]] = tensor
        elif "lora" in parts:  # w1 and w2 are transposed, w0 is the bias
            key, number = parts[4][0], {"0.weight": 1, "2.weight": 2, "2.bias": 0}[".".join(parts[6:])]
            made[f"blocks.{parts[2]}.att.{key}{number}"] = tensor.T.contiguous() if number else tensor
        else:
            made[".".join(["blocks", parts[2], *(_PARTS.get(part, part) for part in parts[3:])])] = tensor
    return made


@pytest.mark.slow
def test_the_reference_computes_what_the_authors_package_does(monkeypatch, tmp_path):
    for name, value in {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}.items():
        monkeypatch.setenv(name, value)
    package: Any = pytest.importorskip("rwkv.model")
    model = build("rwkv7", {"head_dim": 64, "hidden_size": 128})  # it takes heads of 64 only
    torch.save(authors_format(model.state_dict()), Path(tmp_path, "model.pth"))
    with torch.no_grad():
        theirs, _ = package.RWKV(model=str(tmp_path / "model"), strategy="cpu fp32").forward(TEXT, None, True)
    ours = logits(model, TEXT)
    assert (theirs - ours).abs().max() < 2e-5 * ours.std()
