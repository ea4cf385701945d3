"""Every family in bfloat16, in which models are served, against transformers in float32.

Random models are undecided: their two best logits are often as near as bfloat16's rounding is large, so that any two
implementations choose differently in a few places of a hundred. A trained model knows what it wants to say. So the
models here are trained, for seconds: until they know a text of NUM_TEXTS * LENGTH random tokens by heart. It has only
ALPHABET different tokens, so the last token alone does not tell the next one; the layers have to. Then the weights are
rounded to bfloat16, and with these three run over the text: transformers in float32, which is right, transformers in
bfloat16, which shows what rounding does to the model (that a router chooses another expert included), and Quire in
bfloat16.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_parity import each_variant
from torch import Tensor
from torch.nn import functional

from support.checkpoints import ALL_VARIANTS, build, write_checkpoint
from support.engines import make_llm, teacher_forced_logits
from support.reference import LENGTHS, logits
from support.ways import FIRST

pytestmark = pytest.mark.texts

NUM_TEXTS, LENGTH, ALPHABET = 2, 100, 40
SELECTING = {"glm5_next"}  # its layers select tokens, and a rounded score selects another one
STEPS, LEARNING_RATE = 80, 6e-3


def texts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(4, 4 + ALPHABET) for _ in range(LENGTH)] for _ in range(NUM_TEXTS)]


def learn_by_heart(model: Any) -> None:
    ids = torch.tensor(texts())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(2 * STEPS):
        predicted = model(ids).logits[:, :-1]
        if step >= STEPS and (predicted.argmax(-1) == ids[:, 1:]).float().mean() >= 0.98:
            break
        optimizer.zero_grad()
        functional.cross_entropy(predicted.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def cast(model: Any, dtype: torch.dtype) -> None:
    """The parameters alone: what transformers computes itself, such as rotary frequencies, it keeps in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def trained(variant: str) -> Any:
    """A trained model of transformers in float32, whose weights are bfloat16 numbers."""
    kind, config, writing = ALL_VARIANTS[variant]
    model = build(kind, config, writing.get("seed", 0))
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.train()
    learn_by_heart(model)
    cast(model, torch.bfloat16)
    cast(model, torch.float32)
    return model.eval()


def all_logits(model: Any) -> Tensor:
    return torch.cat([logits(model, text).float() for text in texts()])


def error(ours: Tensor, right: Tensor) -> float:
    return float((ours - right).std() / right.std())


@pytest.mark.sampled(32)
@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in FIRST if v != "step1"])  # whose biases learn no text in so few steps
def test_bfloat16_chooses_the_tokens_that_float32_does(tmp_path, variant):
    model = trained(variant)
    kind, config, writing = ALL_VARIANTS[variant]
    path = write_checkpoint(tmp_path, kind, config, network=model, **writing)
    right = all_logits(model)
    cast(model, torch.bfloat16)
    rounded = all_logits(model)

    following = torch.tensor([[*text[1:], -1] for text in texts()]).flatten()
    known = following >= 0
    assert (right.argmax(-1) == following)[known].float().mean() >= 0.98, "it has not learned its text"
    llm = make_llm(path, dtype="bfloat16")
    ours = torch.cat([teacher_forced_logits(llm, text) for text in texts()]).float()

    def share_of_right(logits: Tensor) -> Tensor:
        return (logits.argmax(-1) == right.argmax(-1))[known].float().mean()

    least = 0.98 if variant in SELECTING else 0.99
    assert share_of_right(ours) >= min(least, max(0.98, share_of_right(rounded)))
    assert error(ours, right) <= 1.5 * error(rounded, right)


@pytest.mark.sampled(63)
@each_variant
def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoints, references, variant):
    """Random models, all variants."""
    check_that_errors_are_as_small_as_those_of_transformers(checkpoints, references, variant, torch.bfloat16)


def check_that_errors_are_as_small_as_those_of_transformers(checkpoints, references, variant, dtype):
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    model = references.model(variant)
    right = logits(model, text)
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    cast(model, dtype)
    rounded = logits(model, text).float()
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    ours = teacher_forced_logits(make_llm(checkpoints.path(variant), dtype=str(dtype).removeprefix("torch.")), text)
    assert error(ours.float(), right) <= 1.5 * error(rounded, right)
