"""Where the thinking of an answer ends, as the processor tells the core."""

from __future__ import annotations

import pytest

from quire.checkpoints.hub import model_directory
from quire.config.engine import EngineConfig
from quire.engine.frontend import Frontend
from quire.engine.processor import Processor
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import ThinkingLimits

BUDGET = SamplingParams(thinking_token_budget=5)
CONSTRAINED = SamplingParams(structured_outputs={"choice": ["a"]})


def processor(parser: str) -> Processor:
    config = EngineConfig.create(reasoning_parser=parser)
    return Frontend(config, model_directory(config.model), in_process=True).processor


@pytest.fixture(scope="module")
def thinker() -> Processor:
    return processor("qwen3")


def limits(subject: Processor, prompt: str, params: SamplingParams) -> ThinkingLimits | None:
    return subject.process("a", prompt, params).core_requests[0].thinking


def test_an_answer_begins_as_the_prompt_ends(thinker):
    start, end = (thinker.tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
    calls = [thinker.tokenizer.encode("<tool_call>", add_special_tokens=False)]
    assert limits(thinker, "Hello<think>\n", BUDGET) == ThinkingLimits(end, start, True, 5, [], calls)
    assert limits(thinker, "Hello", CONSTRAINED) == ThinkingLimits(end, start, False)
    assert limits(thinker, "Hello<think>\n\n</think>\n\n", CONSTRAINED) == ThinkingLimits(end, [], False)
    always = processor("deepseek_r1")
    assert limits(always, "Hello", BUDGET).is_open
    assert not limits(always, "Hello</think>", BUDGET).is_open


def test_thinking_in_a_channel_is_closed_by_the_beginning_of_another():
    found = limits(processor("openai_gptoss"), "<|start|>assistant", BUDGET)
    assert found.is_open
    assert len(found.closing_ids) > len(found.end_ids)


def test_a_request_that_limits_nothing_needs_no_limits(thinker):
    assert limits(thinker, "Hello<think>\n", SamplingParams()) is None
    assert limits(thinker, "Hello<think>\n", SamplingParams(thinking_token_budget=-1)) is None
    assert limits(processor("none"), "Hello", CONSTRAINED) is None


def test_a_budget_needs_a_format_and_a_sensible_number():
    with pytest.raises(ValueError, match="thinking_token_budget needs the format of the model's thinking"):
        limits(processor("none"), "Hello", BUDGET)
    with pytest.raises(ValueError, match="thinking_token_budget must be at least -1"):
        SamplingParams(thinking_token_budget=-2)
