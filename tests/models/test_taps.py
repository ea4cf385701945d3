"""Hidden states of chosen layers are those of transformers, in steps of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.step_inputs import StepSize
from support.engines import GREEDY, forced_logits, generate, make_llm, runner_of, tokens_of
from support.reference import prompts

# One branch after the other, with norms behind the branches or scaled ones; both from one input; norms after the sum.
VARIANTS = ["llama", "gemma2", "granite", "falcon", "cohere", "gpt2", "opt-post-norm-projections", "deepseek_v3"]
CHUNKS = [7, 6, 1, 1, 1]  # the steps of one token are recorded and then replayed, where the layers allow it
TEXT = prompts(320, 9)[-1][: sum(CHUNKS)]


class TappedForward:
    """A runner's forward that has these layers written out, and keeps what each step wrote."""

    def __init__(self, runner: Any, layers: list[int]) -> None:
        self.forward, self.fit, model = runner.forward, runner.forward.fit, runner.model
        self.logits = runner.forward.logits
        size, dtype = model.spec.hidden_size, model.kernels.target.dtype
        self.forward.taps = {layer: torch.full((32, size), torch.nan, dtype=dtype) for layer in layers}
        self.written: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def __call__(self, inputs: Any, rows: Tensor | None = None) -> Tensor:
        hidden = self.forward(inputs, rows)
        for layer, tensor in self.forward.taps.items():
            assert tensor[inputs.size.tokens :].isnan().all(), "only the step's tokens are written"
            self.written[layer].append(tensor[: inputs.size.tokens].clone())
            tensor.fill_(torch.nan)
        return hidden


def tap(runner: Any, layers: list[int]) -> dict[int, list[Tensor]]:
    runner.forward = TappedForward(runner, layers)
    return runner.forward.written


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_taps_are_the_hidden_states_of_transformers(checkpoints, references, variant):
    llm = make_llm(checkpoints.path(variant))
    runner = runner_of(llm)
    forward, layers = runner.forward, list(range(runner.model.spec.num_layers))
    written = tap(runner, layers)
    forced_logits(runner, TEXT, CHUNKS)
    right = references.model(variant)(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    with torch.inference_mode():
        made = [torch.cat(written[layer]) for layer in layers]
        made[-1] = runner.model.final_norm(made[-1])  # as transformers does with its last
        if runner.model.project_out is not None:
            made[-1] = runner.model.project_out(made[-1])
        for layer, wanted in zip(layers, right[1:], strict=True):
            assert (made[layer] - wanted[0]).abs().max() / wanted.std() < 5e-5, f"layer {layer}"
    if variant == "llama":
        assert list(forward._recorded) == [StepSize(1, 1, 1)], "the steps of one token were recorded"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tapped_last_layer_computes_all_tokens_and_hands_on_the_wanted_ones(checkpoints, variant):
    """A sampling engine asks the last layer for the last token of a prompt alone."""
    usual, tapped = (make_llm(checkpoints.path(variant), max_num_batched_tokens=32) for _ in range(2))
    last = runner_of(tapped).model.spec.num_layers - 1
    written = tap(runner_of(tapped), [last])
    texts = [TEXT, TEXT[3:11]]
    assert tokens_of(generate(tapped, texts)) == tokens_of(generate(usual, texts))
    assert len(written[last][0]) == len(TEXT) + len(TEXT[3:11])
    assert not any(step.isnan().any() for step in written[last])
    assert sum(map(len, written[last])) == len(TEXT) + len(TEXT[3:11]) + 2 * (GREEDY.max_tokens - 1)


def test_layers_that_are_not_tapped_are_not_written(checkpoints):
    runner = runner_of(make_llm(checkpoints.path("llama")))
    calls: list[int] = []
    add = runner.model.kernels.add
    runner.model.kernels.add = lambda x, residual, out: (calls.append(len(x)), add(x, residual, out))[1]
    forced_logits(runner, TEXT)
    assert not calls
    written = tap(runner, [0])
    forced_logits(runner, TEXT)
    assert calls == [len(TEXT)]
    assert len(written[0]) == 1
