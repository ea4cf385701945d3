"""Models in float16 on a CPU: as near to float32 as transformers is, torch's tokens, and recorded steps."""

from __future__ import annotations

import pytest
import torch
from test_bfloat16 import check_that_errors_are_as_small_as_those_of_transformers

from quire.checkpoints.hub import bundled_model
from quire.messages.sampling_params import SamplingParams
from quire.ops.cpu.build import library
from support.engines import generate, make_llm, tokens_of

pytestmark = [
    pytest.mark.texts,
    pytest.mark.skipif(library() is None, reason="the C++ kernels, which are tested here, need a compiler"),
]

# Grouped heads, experts, latent attention, ALiBi, layer norms, recurrent layers.
VARIANTS = ["llama", "qwen3_moe", "deepseek_v3", "falcon-rw", "gpt2", "falcon_h1", "rwkv7"]
PROMPTS = ["Once upon a time", "The little dog", "One day, Lily and her mom", "Tom was sad because"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_is_as_near_to_float32_as_transformers_is(checkpoints, references, variant):
    check_that_errors_are_as_small_as_those_of_transformers(checkpoints, references, variant, torch.float16)


def test_the_bundled_model_says_what_it_says_with_torchs_operations():
    llm, reference = (make_llm(bundled_model(), backend, dtype="float16") for backend in ("cpu", "reference"))
    params = SamplingParams(temperature=0, max_tokens=60)
    assert tokens_of(generate(llm, PROMPTS, params)) == tokens_of(generate(reference, PROMPTS, params))
    assert llm.core.executor.runner.forward.usable, "its steps are recorded"
