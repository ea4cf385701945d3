import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import IncrementalDetokenizer

GRAPHEMES = [
    "👍🏽",
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "你好",
    "한",
    "é",
    "ß",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\ufffd",
    "the",
    " quick",
    "it's",
    ".",
]
TEXTS = st.lists(st.sampled_from(GRAPHEMES) | st.characters(exclude_categories=["Cs"]), max_size=20).map("".join)
QUICK = settings(max_examples=50, deadline=None)


def chunks_of(data, ids):
    """The ids one at a time, or cut anywhere."""
    if data.draw(st.booleans(), "one at a time"):
        return [[token_id] for token_id in ids]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5), "cuts"))
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(detokenizer, chunks):
    """The deltas that a client sees, and the stop string that ended them."""
    deltas = []
    for chunk in chunks:
        stop = detokenizer.append(chunk)
        if stop is not None:
            return [*deltas, detokenizer.next_delta(finished=True)], stop
        deltas.append(detokenizer.next_delta(finished=False))
    return [*deltas, detokenizer.flush()], None


def text_after(tokenizer, prompt, ids, skip_special_tokens=True):
    """The straightforward definition: what decoding the whole adds to decoding the prompt."""
    before, whole = (tokenizer.decode(part, skip_special_tokens) for part in (prompt, prompt + ids))
    return whole[len(os.path.commonprefix([before, whole])) :]  # noqa: RUF071  (characters are what is meant)


@pytest.mark.sampled(2)
@QUICK
@given(data=st.data(), prompt=TEXTS, text=TEXTS)
def test_deltas_join_to_the_text_that_follows_the_prompt(tokenizer, data, prompt, text):
    prompt_ids = tokenizer.encode(prompt)
    # Not cut between prompt and text by the tokenizer but by a model, that goes on in the middle of a text.
    ids = tokenizer.encode("x" + text, add_special_tokens=False)[data.draw(st.integers(0, 1), "drop") :]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    deltas, _ = stream(detokenizer, chunks_of(data, ids))
    assert "".join(deltas) == text_after(tokenizer, prompt_ids, ids)


@pytest.mark.sampled(2)
@QUICK
@given(data=st.data(), text=TEXTS)
def test_no_delta_ends_within_a_character(tokenizer, data, text):
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    deltas, _ = stream(detokenizer, chunks_of(data, ids))
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids)


@QUICK
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_any_token_ids_whatever_give_the_text_of_the_whole(byte_level_tokenizer, data, skip_special_tokens):
    tokenizer = byte_level_tokenizer
    # Most tokens of the lowest ids are single bytes, so most of these are invalid UTF-8; some ids do not exist.
    some_ids = st.lists(st.integers(0, 300) | st.integers(0, tokenizer.vocab_size + 5), max_size=30)
    prompt, ids = data.draw(some_ids, "prompt"), data.draw(some_ids, "output")
    if tokenizer.decode(prompt, skip_special_tokens).endswith("\ufffd"):
        prompt.append(tokenizer.token_to_id("a"))  # the other case has a test of its own
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    deltas, _ = stream(detokenizer, chunks_of(data, ids))
    assert "".join(deltas) == text_after(tokenizer, prompt, ids, skip_special_tokens)


@QUICK
@given(data=st.data())
def test_any_byte_tokens_of_sentencepiece_are_read_as_utf_8(sentencepiece_tokenizer, data):
    tokenizer = sentencepiece_tokenizer
    values = data.draw(st.lists(st.integers(0, 255) | st.sampled_from([*"你👍".encode()]), max_size=20), "bytes")
    ids = [tokenizer.token_to_id(f"<0x{value:02X}>") for value in values]
    deltas, _ = stream(IncrementalDetokenizer(tokenizer, tokenizer.encode("a")), chunks_of(data, ids))
    assert "".join(deltas) == bytes(values).decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["byte_level_tokenizer", "sentencepiece_tokenizer"])
def test_a_character_that_the_prompt_began_is_output_if_completed_and_dropped_if_not(request, kind):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("a\U0001f987", add_special_tokens=False)
    for split in range(len(ids) - 3, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:split])
        assert [detokenizer.append(ids[split:]), detokenizer.next_delta(False)] == [None, "\U0001f987"]
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:split])
        detokenizer.append([tokenizer.token_to_id("a")])
        assert detokenizer.next_delta(False) == "a"
        assert IncrementalDetokenizer(tokenizer, ids[:split]).flush() == ""


def test_an_unfinished_character_appears_as_u_fffd_at_the_end_only(byte_level_tokenizer):
    tokenizer = byte_level_tokenizer
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for token_id in tokenizer.encode("\U0001f987")[:-1]:
        detokenizer.append([token_id])
        assert detokenizer.next_delta(finished=False) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def reference_stop(tokenizer, prompt, ids, stops, include, min_tokens):
    """Brute force: every character of the growing text, in order, may end a stop string."""
    text = text_after(tokenizer, prompt, ids)
    exempt = IncrementalDetokenizer(tokenizer, prompt)
    exempt.append(ids[:min_tokens])
    for end in range(len(exempt.next_delta(finished=False)) + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text("abé你👍 ", max_size=30)


@pytest.mark.sampled(4)
@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    text=LETTERS,
    stops=st.lists(st.text("abé你👍 ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_stop_strings_are_found_as_brute_force_finds_them(tokenizer, data, text, stops, include, min_tokens):
    prompt, ids = tokenizer.encode("the"), tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    deltas, stop = stream(detokenizer, chunks_of(data, ids))
    assert ("".join(deltas), stop) == reference_stop(tokenizer, prompt, ids, stops, include, min_tokens)


def test_what_may_be_the_start_of_a_stop_string_is_held_back(byte_level_tokenizer):
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer, [], stop=["STOP", "x"])
    shown = []
    for character in "abcSTO.":
        detokenizer.append(byte_level_tokenizer.encode(character))
        shown.append(detokenizer.next_delta(finished=False))
    assert shown == ["", "", "", "a", "b", "c", "S"]
    assert detokenizer.flush() == "TO."


def test_a_stop_string_inside_one_token_cuts_that_token(byte_level_tokenizer):
    [token_id] = byte_level_tokenizer.encode(" the")
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer, [], stop=["h"])
    assert detokenizer.append([token_id]) == "h"
    assert detokenizer.flush() == " t"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_token_that_ended_the_request_is_text_only_if_asked_for(byte_level_tokenizer, include, text):
    a, b = (byte_level_tokenizer.token_to_id(letter) for letter in "ab")
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer, [], include_stop_str_in_output=include)
    detokenizer.append([a, b], finished_by_token=True)
    assert detokenizer.flush() == text


def test_special_tokens_are_text_only_if_not_skipped(tokenizer):
    a, eos = tokenizer.encode("the", add_special_tokens=False), tokenizer.eos_token_id
    for skip in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
        detokenizer.append([*a, eos, *a])
        assert detokenizer.flush() == tokenizer.decode([*a, eos, *a], skip)


def test_added_tokens_stand_without_spaces_between_them_if_asked_for(backends, checkpoints, tokenizer):
    start, end = (tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    detokenizer = IncrementalDetokenizer(
        tokenizer, [start], skip_special_tokens=False, spaces_between_special_tokens=False
    )
    detokenizer.append([end, start])
    detokenizer.append([end])
    assert detokenizer.flush().lstrip() == "<|im_end|><|im_start|><|im_end|>"
