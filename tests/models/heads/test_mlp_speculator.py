"""The MLP speculator in IBM's format, against the formulas of the paper and of its code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.models.heads.mlp_speculator import mlp_speculator
from support.layers import draw
from support.state_heads import TARGET, Chooser, make_head, make_target
from support.thread_group import on_every_rank

HIDDEN, VOCAB, DRAFTS = TARGET["hidden_size"], TARGET["vocab_size"], 4
X, IDS = draw("x", 5, HIDDEN), torch.tensor([3, 0, VOCAB - 1, 3, 40])
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": HIDDEN,
    "vocab_size": VOCAB,
    "n_predict": DRAFTS,
    "top_k_tokens_per_head": [4, 3, 2, 2],
    "n_candidates": 5,
}


def tensors_of(inner: int, tied: bool, drafts: int = DRAFTS) -> dict[str, Tensor]:
    """All tensors that transformers saves; of tied weights it saves a copy for each draft."""
    tensors = {}
    for i in range(drafts):
        own = 0 if tied else i
        proj = min(i, 1) if tied else i
        tensors |= {
            f"speculator.emb.{i}.weight": draw(f"e{own}", VOCAB, inner),
            f"speculator.proj.{i}.weight": draw(f"p{proj}", inner, inner if i else HIDDEN),
            f"speculator.ln.{i}.weight": draw(f"lw{own}", inner),
            f"speculator.ln.{i}.bias": draw(f"lb{own}", inner),
            f"speculator.head.{i}.weight": draw(f"h{own}", VOCAB, inner),
        }
    return tensors


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def by_formula(tensors: dict[str, Tensor], inner: int, scaled: bool, count: int) -> tuple[list[Tensor], Tensor]:
    t = {name.removeprefix("speculator."): tensor.double() for name, tensor in tensors.items()}
    state_weight = 0.5 ** (0.5 / DRAFTS)
    emb_weight = math.sqrt(1 - state_weight**2)
    state, ids = X.double(), IDS
    if scaled:
        state = norm(state) / math.sqrt(2)
    logits, drafts = [], []
    for i in range(count):
        z = t[f"emb.{i}.weight"][ids] * emb_weight * math.sqrt(inner / 2)
        state = norm(state @ t[f"proj.{i}.weight"].T * state_weight + z)
        state = state * t[f"ln.{i}.weight"] + t[f"ln.{i}.bias"]
        state = state * (1 + torch.erf(state / math.sqrt(2))) / 2
        logits.append(state @ t[f"head.{i}.weight"].T)
        ids = logits[-1].argmax(dim=-1)
        drafts.append(ids)
    return logits, torch.stack(drafts, dim=1)


def check(head: Any, wanted: tuple[list[Tensor], Tensor], count: int) -> None:
    choose = Chooser()
    with torch.inference_mode():
        drafts = head.draft(X, IDS, count, choose)
    for made, right in zip(choose.logits, wanted[0], strict=True):
        torch.testing.assert_close(made.double(), right, rtol=1e-4, atol=1e-4)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == wanted[1].tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner_dim", [0, 37])
def test_drafts_are_those_of_the_formulas(tmp_path, inner_dim, tied, scaled, kernels):
    inner = inner_dim or HIDDEN
    tensors = tensors_of(inner, tied)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**CONFIG, "inner_dim": inner_dim, "tie_weights": tied, "scale_input": scaled}
    head = make_head(mlp_speculator, config, tmp_path, make_target()[0], kernels)
    assert head.most == DRAFTS
    for count in (1, DRAFTS):
        check(head, by_formula(tensors, inner, scaled, count), count)


def test_tied_weights_need_no_copies(tmp_path):
    """And the tensors of fms itself have no prefix."""
    tensors = tensors_of(20, tied=True)
    kept = {n.removeprefix("speculator."): t for n, t in tensors.items() if ".0." in n or "proj.1" in n}
    save_file(kept, tmp_path / "model.safetensors")
    config = {**CONFIG, "inner_dim": 20, "tie_weights": True}
    check(make_head(mlp_speculator, config, tmp_path, make_target()[0]), by_formula(tensors, 20, False, 3), 3)


def test_the_weights_of_a_draft_that_is_not_tied_may_not_be_missing(tmp_path):
    tensors = tensors_of(20, tied=False)
    del tensors["speculator.ln.2.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"missing: speculator\.ln\.2\.bias"):
        make_head(mlp_speculator, {**CONFIG, "inner_dim": 20}, tmp_path, make_target()[0])


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_say_what_one_says(tmp_path, tied):
    tensors = tensors_of(21, tied)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**CONFIG, "inner_dim": 21, "tie_weights": tied}

    def work(group: Any) -> None:
        head = make_head(mlp_speculator, config, tmp_path, make_target(group)[0], group=group)
        check(head, by_formula(tensors, 21, False, DRAFTS), DRAFTS)

    on_every_rank(2, work)


@pytest.mark.parametrize("tied", [False, True])
def test_one_draft(tmp_path, tied):
    save_file(tensors_of(20, tied, drafts=1), tmp_path / "model.safetensors")
    config = {**CONFIG, "n_predict": 1, "inner_dim": 20, "tie_weights": tied}
    head = make_head(mlp_speculator, config, tmp_path, make_target()[0])
    assert head.draft(X, IDS, 1, Chooser()).shape == (len(X), 1)


@pytest.mark.parametrize("field", ["emb_dim", "vocab_size"])
def test_a_head_of_another_model_is_an_error_with_both_numbers(field):
    config = {**CONFIG, field: CONFIG[field] + 1}
    with pytest.raises(ValueError, match=f"{field} {CONFIG[field] + 1}, but the model has {CONFIG[field]}"):
        make_head(mlp_speculator, config, None, make_target()[0])
