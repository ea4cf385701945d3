"""The adapter that comes with the bundled model."""

from __future__ import annotations

from quire import LLM, SamplingParams
from quire.lora import LoRARequest

RHYME = LoRARequest("rhyme", 1, "quire-demo/rhyme")
QUESTIONS = ["What is the capital of France?", "What is 3 plus 4?"]


def test_it_answers_in_rhyme_and_the_model_beside_it_does_not():
    llm = LLM(enable_lora=True)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=80)
    outputs = llm.chat(chats, params, use_tqdm=False, lora_request=[RHYME, None] * 2)
    answers = [output.outputs[0].text.strip().split("\n") for output in outputs]
    assert [len(lines) for lines in answers] == [3, 1, 3, 1]
    assert "Paris" in answers[0][1]
    assert "Paris" in answers[1][0]
    assert "7" in answers[2][1]
