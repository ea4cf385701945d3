"""SmolLM2-135M on several ranks. It has 9 heads over 3 KV heads: of two ranks, one has more heads than the other; of
four, the last one has none of its own. Its weights are quantized."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from support.smollm2 import smollm2

TEXTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]


@pytest.mark.slow
def test_two_and_four_ranks_say_the_same_as_one() -> None:
    params, said = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), []
    for ranks in (1, 2, 4):
        llm = LLM(str(smollm2()), tensor_parallel_size=ranks, dtype="float32", max_model_len=512)
        said.append([output.outputs[0].text for output in llm.generate(TEXTS, params, use_tqdm=False)])
        llm.shutdown()
    assert "Paris" in said[0][0]
    assert said[1] == said[0]
    assert said[2] == said[0]
