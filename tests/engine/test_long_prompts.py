"""Prompts that cannot fit are refused without being tokenized; prompts that may be truncated are cut before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoints.hub import bundled_model
from quire.config.engine import EngineConfig
from quire.engine.frontend import Frontend
from quire.engine.processor import CUT_MARGIN, Processor, PromptTooLongError
from quire.messages.sampling_params import SamplingParams
from quire.text.long_texts import PART

WORDS = "Once upon a time there was a small engine. " * 40


@pytest.fixture(scope="module")
def processor() -> Processor:
    """The bundled model's."""
    return Frontend(EngineConfig.create(), bundled_model(), in_process=False).processor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", ["x" * 10_000_000, "中" * 10_000_000, {"prompt": " " * 10_000_000}])
def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(processor, monkeypatch, prompt):
    monkeypatch.delattr(type(processor.tokenizer), "encode")
    with pytest.raises(
        PromptTooLongError, match=r"10000000 characters, which are \d+ tokens or more.*max_model_len is"
    ):
        processor.process("a", prompt, SamplingParams())


def test_token_ids_that_cannot_fit_are_counted_first(processor):
    with pytest.raises(PromptTooLongError, match="has 3000000 tokens"):
        processor.process("a", {"prompt_token_ids": ["not", "looked", "at"] * 1_000_000}, SamplingParams())


@pytest.fixture
def without_bound(processor, monkeypatch) -> None:
    """A tokenizer whose tokens may have any length, so that it has to count them. It gets no long texts."""
    encode = processor.tokenizer.encode

    def encode_short(text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= 2 * PART
        return encode(text, add_special_tokens)

    monkeypatch.setattr(processor.tokenizer, "length_bound", None)
    monkeypatch.setattr(processor.tokenizer, "encode", encode_short)


@pytest.mark.parametrize("prompt", ["x y " * 5_000_000, {"prompt": "中" * 10_000_000}])
def test_a_text_that_cannot_fit_is_refused_when_enough_tokens_are_counted(processor, without_bound, prompt):
    with pytest.raises(PromptTooLongError, match=r"0000000 characters, and the first of them are more tokens than max"):
        processor.process("a", prompt, SamplingParams())


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_end_that_is_kept_is_tokenized_without_a_bound(processor, without_bound, side):
    words = " ".join(f"word{i}" for i in range(300_000))
    params = SamplingParams(truncate_prompt_tokens=100, truncation_side=side)
    kept = processor.process("a", words, params).prompt_token_ids
    part = words[-10_000:] if side == "left" else words[:10_000]
    whole = processor.tokenizer.encode(part)
    assert kept == (whole[-100:] if side == "left" else whole[:100])


@settings(max_examples=15, deadline=None)
@given(
    text=st.lists(st.sampled_from([WORDS, "naïve café ", "\n\n", "1234567890", "中文字", "  ", "x"]), max_size=60),
    times=st.integers(1, 150),
    keep=st.integers(1, 500),
    side=st.sampled_from(["left", "right"]),
)
def test_a_text_that_is_cut_before_it_is_tokenized_keeps_the_same_tokens(processor, text, times, keep, side):
    text = "".join([*text, "end"]) * times
    params = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
    whole = processor.tokenizer.encode(text)
    expected = whole[-keep:] if side == "left" else whole[:keep]
    assert processor.process("a", text, params).prompt_token_ids == expected


def test_only_a_part_of_a_long_text_is_tokenized_if_it_may_be_truncated(processor, monkeypatch):
    tokenized = []
    encode = processor.tokenizer.encode
    monkeypatch.setattr(
        processor.tokenizer, "encode", lambda text, special=True: tokenized.append(text) or encode(text)
    )
    params = SamplingParams(truncate_prompt_tokens=10)
    assert len(processor.process("a", "x y " * 5_000_000, params).prompt_token_ids) == 10
    assert len(tokenized[0]) == (10 + CUT_MARGIN) * processor.tokenizer.length_bound.bytes_per_token
    ids = processor.process("a", {"prompt_token_ids": [-1] * 1_000_000 + list(range(20))}, params).prompt_token_ids
    assert ids == list(range(10, 20))
