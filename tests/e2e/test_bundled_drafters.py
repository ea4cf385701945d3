"""The drafters of the bundled model, by their names."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "How many legs does a spider have?",
    "Write a short poem about the sea.",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "share"), [("eagle3", 0.85), ("medusa", 0.55), ("draft", 0.65)])
def test_first_drafts_are_mostly_right_and_answers_are_the_same(name: str, share: float):
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60) for i in range(len(PROMPTS))]
    options = {"max_model_len": 256, "max_num_seqs": 4}
    expected = [output.outputs[0].text for output in LLM(**options).chat(chats, params, use_tqdm=False)]
    config = {"model": f"quire-demo/{name}", "num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(speculative_config=config, **options)
    assert [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)] == expected
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.accepted_at[0] > share * stats.drafts
