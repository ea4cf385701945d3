"""Models in float16 on a CPU: as near to float32 as transformers is, torch's tokens, and recorded steps."""

from __future__ import annotations

import pytest
import torch
from test_bfloat16 import cast, error

from quire.loading.hub import bundled_model
from quire.messages.sampling_params import SamplingParams
from quire.ops.cpu.build import library
from support.engines import generate, make_llm, teacher_forced_logits, tokens_of
from support.reference import LENGTHS, logits

pytestmark = [
    pytest.mark.texts, pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
]  # fmt: skip

# Grouped heads, experts, latent attention, ALiBi, layer norms, recurrent layers.
VARIANTS = ["llama", "qwen3_moe", "deepseek_v3", "falcon-rw", "gpt2", "falcon_h1", "rwkv7"]
PROMPTS = ["Once upon a time", "The little dog", "One day, Lily and her mom", "Tom was sad because"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_is_as_near_to_float32_as_transformers_is(checkpoints, references, variant):
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    model = references.model(variant)
    right = logits(model, text)
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    cast(model, torch.float16)
    rounded = logits(model, text).float()
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    llm = make_llm(checkpoints.path(variant), dtype="float16")
    assert error(teacher_forced_logits(llm, text).float(), right) <= 1.5 * error(rounded, right)


def test_the_bundled_model_says_what_it_says_with_torchs_operations():
    llm, reference = (make_llm(bundled_model(), backend, dtype="float16") for backend in ("cpu", "reference"))
    params = SamplingParams(temperature=0, max_tokens=60)
    assert tokens_of(generate(llm, PROMPTS, params)) == tokens_of(generate(reference, PROMPTS, params))
    assert llm.core.executor.runner.forward.usable, "its steps are recorded"
