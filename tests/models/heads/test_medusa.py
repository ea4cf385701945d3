"""Medusa heads in every published format, against the paper's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.weights import load_weights, open_checkpoint
from quire.layers.build import Builder
from quire.layers.linear import DenseWeight
from quire.models.decoder import Decoder
from quire.models.heads.medusa import medusa
from quire.parallel.mesh import Communicator
from support.layers import draw
from support.state_heads import TARGET, Chooser, make_head, make_target
from support.thread_group import on_every_rank

HIDDEN, VOCAB = TARGET["hidden_size"], TARGET["vocab_size"]
HEADS = 3
X, IDS = draw("x", 5, HIDDEN), torch.arange(5)
Tensors = dict[str, Tensor]


def parts(layers: int, bias: bool = True, rows: int = VOCAB) -> tuple[list[list[Tensor]], list[Any], list[Tensor]]:
    """Weights and biases [head][layer], and a matrix of each head."""
    weights = [[draw(f"w{i}{j}", HIDDEN, HIDDEN) * 0.3 for j in range(layers)] for i in range(HEADS)]
    biases = [[draw(f"b{i}{j}", HIDDEN) if bias else None for j in range(layers)] for i in range(HEADS)]
    return weights, biases, [draw(f"m{i}", rows, HIDDEN) for i in range(HEADS)]


def tensors_of(blocks: Any, matrices: list[Tensor], block: str, matrix: str) -> Tensors:
    weights, biases = blocks
    tensors = {f"{matrix.format(i=i, n=len(weights[i]))}.weight": m for i, m in enumerate(matrices)}
    for i in range(HEADS):
        for j, (weight, bias) in enumerate(zip(weights[i], biases[i], strict=True)):
            name = block.format(i=i, j=j)
            tensors |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    return tensors


def by_formula(blocks: Any, matrices: list[Tensor]) -> list[Tensor]:
    """The paper's p^(k) before the softmax: W2 (SiLU(W1 h) + h), with one or several of the inner layers."""
    logits = []
    for weights, biases, matrix in zip(*blocks, matrices, strict=True):
        x = X
        for weight, bias in zip(weights, biases, strict=True):
            y = x @ weight.T + (0 if bias is None else bias)
            x = x + y / (1 + torch.exp(-y))
        logits.append(x @ matrix.T)
    return logits


def check(head: Any, wanted: list[Tensor], count: int = HEADS) -> None:
    choose = Chooser()
    with torch.inference_mode():
        drafts = head.draft(X, IDS, count, choose)
    assert len(choose.logits) == count
    for made, right in zip(choose.logits, wanted, strict=False):
        torch.testing.assert_close(made, right)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == torch.stack(wanted[:count], dim=1).argmax(dim=-1).tolist()


PUBLISHED = ("{i}.{j}.linear", "{i}.{n}")
VLLM = ("blocks.{i}.layers.{j}", "lm_heads.{i}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"])
def test_heads_as_they_are_published_with_matrices_of_their_own(tmp_path, file, layers, kernels):
    *blocks, matrices = parts(layers)
    names = VLLM if file == "model.safetensors" else PUBLISHED
    tensors = tensors_of(blocks, matrices, *names)
    (torch.save if file.endswith(".pt") else save_file)(tensors, tmp_path / file)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # medusa-vicuna-7b-v1.3 says 2, and has 5
    head = make_head(medusa, config, tmp_path, make_target()[0], kernels)
    assert head.most == HEADS
    for count in range(1, HEADS + 1):
        check(head, by_formula(blocks, matrices), count)


@pytest.mark.parametrize("names", [PUBLISHED, VLLM])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_without_matrices_use_the_one_of_the_model(tmp_path, names, prefix, bias):
    *blocks, _ = parts(2, bias)
    save_file(tensors_of(blocks, [], *(prefix + name for name in names)), tmp_path / "model.safetensors")
    target, tensors = make_target()
    # The config of a community checkpoint is the base model's, with two more fields.
    config = {**TARGET, "num_hidden_layers": 7, "medusa_num_heads": HEADS, "medusa_num_layers": 2}
    for kernels in ("cpu", "reference"):
        head = make_head(medusa, config, tmp_path, target, kernels)
        check(head, by_formula(blocks, [tensors["lm_head.weight"]] * HEADS), 2)


@pytest.mark.parametrize("name", ["lm_head", "lm_heads.0"])
def test_one_matrix_for_all_heads(tmp_path, name):
    """vLLM's original_lm_head: the checkpoint has the matrix under one of two names. Other heads' are not read."""
    *blocks, matrices = parts(1, bias=False)
    tensors = {**tensors_of(blocks, matrices, *VLLM), "lm_heads.0.weight": draw("other", VOCAB, HIDDEN)}
    tensors[f"{name}.weight"] = matrices[0]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"num_heads": HEADS, "num_hidden_layers": 1, "original_lm_head": True}
    check(make_head(medusa, config, tmp_path, make_target()[0]), by_formula(blocks, matrices[:1] * HEADS))


def test_a_model_that_contains_its_heads_is_both(tmp_path):
    """Medusa-2 trains the whole model, so its checkpoints are a model with heads."""
    *blocks, matrices = parts(1)
    target, model = make_target()
    heads = tensors_of(blocks, matrices, *("medusa_head." + name for name in PUBLISHED))
    save_file({**model, **heads}, tmp_path / "model.safetensors")
    check(make_head(medusa, {**TARGET, "medusa_num_heads": HEADS}, tmp_path, target), by_formula(blocks, matrices))

    reload = Builder(target.kernels, Communicator(), lambda name: DenseWeight)
    same = Decoder(reload, target.spec, 32)
    load_weights(open_checkpoint(tmp_path), reload, target.spec.ignored, False)
    assert torch.equal(same.logits(X), target.logits(X))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_fewer_tokens_than_the_model_has(tmp_path, offsets, shared):
    ids = torch.tensor([2, 3, 11, 30, 66])
    *blocks, matrices = parts(1, rows=len(ids))
    token_map = {"d2t": ids - torch.arange(len(ids)), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    token_map = token_map if offsets else {"token_map": ids}
    save_file({**tensors_of(blocks, matrices, *VLLM), **token_map}, tmp_path / "model.safetensors")
    config = {"num_heads": HEADS, "truncated_vocab_size": len(ids), "original_lm_head": shared}
    head = make_head(medusa, config, tmp_path, make_target()[0])
    wanted = []
    for logits in by_formula(blocks, matrices[:1] * HEADS if shared else matrices):
        whole = torch.full((len(X), VOCAB), -torch.inf)
        whole[:, ids] = logits
        wanted.append(whole)
    check(head, wanted)


def test_a_token_map_that_the_config_does_not_ask_for_is_not_read(tmp_path):
    *blocks, matrices = parts(1)
    tensors = {**tensors_of(blocks, matrices, *VLLM), "token_map": torch.arange(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"num_heads": HEADS, "truncated_vocab_size": None}
    check(make_head(medusa, config, tmp_path, make_target()[0]), by_formula(blocks, matrices))


@pytest.mark.parametrize("own", [False, True])
def test_two_ranks_say_what_one_says(tmp_path, own):
    *blocks, matrices = parts(2)
    save_file(tensors_of(blocks, matrices if own else [], *PUBLISHED), tmp_path / "medusa_lm_head.safetensors")

    def work(group: Any) -> Tensor:
        target = make_target(group)[0]
        return torch.stack(draft(make_head(medusa, {}, tmp_path, target, group=group)))

    def draft(head: Any) -> list[Tensor]:
        choose = Chooser()
        head.draft(X, IDS, HEADS, choose)
        return choose.logits

    alone = torch.stack(draft(make_head(medusa, {}, tmp_path, make_target()[0])))
    for logits in on_every_rank(2, work):
        torch.testing.assert_close(logits, alone)


def test_the_logits_are_scaled_as_the_model_scales_its_own(tmp_path):
    *blocks, _ = parts(1)
    save_file(tensors_of(blocks, [], *PUBLISHED), tmp_path / "medusa_lm_head.safetensors")
    target, tensors = make_target(logit_scale=0.5, logit_soft_cap=3.0)
    logits = by_formula(blocks, [tensors["lm_head.weight"]] * HEADS)
    check(make_head(medusa, {}, tmp_path, target), [3 * torch.tanh(rows / 6) for rows in logits])


def test_all_heads_are_two_products(tmp_path):
    """One of all first layers, and one with the shared matrix."""
    *blocks, _ = parts(1)
    save_file(tensors_of(blocks, [], *PUBLISHED), tmp_path / "medusa_lm_head.safetensors")
    target, _ = make_target()
    head = make_head(medusa, {}, tmp_path, target)
    shapes = []
    for weight in (head.first.weight, target.lm_head.weight):
        weight.linear = lambda x, w, bias, linear=weight.linear: (shapes.append((len(x), len(w))), linear(x, w, bias))[
            1
        ]
    head.draft(X, IDS, 2, Chooser())
    assert shapes == [(len(X), HEADS * HIDDEN), (2 * len(X), VOCAB)]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("config", [{"medusa_num_heads": 4}, {"num_heads": 4, "original_lm_head": True}])
def test_dummy_weights_have_the_config_s_shape(config, exists):
    head = make_head(medusa, {**config, "num_hidden_layers": 2}, None, make_target()[0], has=lambda name: exists)
    assert head.most == 4
    assert [len(layers) for layers in head.later] == [1] * 4
    assert head.draft(X, IDS, 4, Chooser()).shape == (len(X), 4)


def test_a_missing_tensor_is_named(tmp_path):
    *blocks, matrices = parts(1)
    tensors = tensors_of(blocks, matrices, *PUBLISHED)
    del tensors["2.1.weight"]
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(WeightError, match=r"missing: 2\.1\.weight"):
        make_head(medusa, {}, tmp_path, make_target()[0])


def test_matrices_of_another_vocabulary_are_an_error(tmp_path):
    *blocks, matrices = parts(1, rows=VOCAB - 1)
    save_file(tensors_of(blocks, matrices, *PUBLISHED), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(
        WeightError, match=r"0\.1\.weight has shape \(66, 24\), but the model's config asks for \(67, 24"
    ):
        make_head(medusa, {}, tmp_path, make_target()[0])
