"""SmolLM2-135M on several ranks. It has 9 heads over 3 KV heads: of two ranks, one has more heads than the other; of
four, the last one has none of its own. Its weights are quantized."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from support.smollm2 import smollm2

TEXTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]


@pytest.mark.nightly
def test_two_and_four_ranks_say_the_same_as_one_also_if_they_divide_tokens() -> None:
    params, said = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), []
    for ranks, divides in ((1, False), (2, True), (4, False), (4, True)):
        options = {"tensor_parallel_size": ranks, "enable_sequence_parallel": divides}
        llm = LLM(str(smollm2()), dtype="float32", max_model_len=512, **options)
        said.append([output.outputs[0].text for output in llm.generate(TEXTS, params, use_tqdm=False)])
        llm.shutdown()
    assert "Paris" in said[0][0]
    assert said[1:] == [said[0]] * 3
