"""`LLM.get_tokenizer()` answers as transformers does with the same files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.text.hf_tokenizer import HFTokenizer

TEXTS = ["Hello, it's me.", "", "Grüße 你好 👍🏽<s> a </s>", "<tool_call> x", "a  b\n\tc"]
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ mood }}{{ eos_token }}"""
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]


@pytest.fixture
def both(pair):
    ours, theirs = pair
    theirs.chat_template = TEMPLATE
    yield HFTokenizer(ours, TEMPLATE), theirs
    theirs.chat_template = None


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_calling_it_encodes_one_text_or_several(both, add_special_tokens):
    ours, theirs = both
    for text in (TEXTS[0], TEXTS):
        given, expected = (of(text, add_special_tokens=add_special_tokens) for of in both)
        for key in ("input_ids", "attention_mask"):
            assert given[key] == expected[key]
        assert given.input_ids == expected.input_ids
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens) == theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert set(ours("a", return_attention_mask=False)) == {"input_ids"}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decoding_takes_ids_lists_arrays_and_tensors(both, skip_special_tokens):
    ours, theirs = both
    batch = [ours.encode(text) for text in TEXTS if text]
    for ids in (*batch, batch, np.array(batch[0]), torch.tensor(batch[0]), 5, []):
        expected = theirs.decode(ids, skip_special_tokens=skip_special_tokens)
        assert ours.decode(ids, skip_special_tokens=skip_special_tokens) == expected
    expected = theirs.batch_decode(batch, skip_special_tokens=skip_special_tokens)
    assert ours.batch_decode(batch, skip_special_tokens=skip_special_tokens) == expected
    assert ours.decode(batch[0]) == theirs.decode(batch[0])


def test_the_vocabulary_and_its_conversions(both):
    ours, theirs = both
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    ids = [*range(20), len(ours) - 1, len(ours) + 1000]
    for skip in (True, False):
        assert ours.convert_ids_to_tokens(ids, skip) == theirs.convert_ids_to_tokens(ids, skip)
    assert ours.convert_ids_to_tokens(7) == theirs.convert_ids_to_tokens(7)
    tokens = [*list(ours.get_vocab())[:20], "no such token"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_tokens_to_ids(tokens[0]) == theirs.convert_tokens_to_ids(tokens[0])


def test_special_tokens_and_their_ids(both):
    ours, theirs = both
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids


def test_special_tokens_without_a_name(checkpoints, backends):
    config = {"eos_token": "</s>", "extra_special_tokens": ["<|im_end|>", "<think>"], "unk_token": "<unk>"}
    ours, theirs = checkpoints.both(backends["byte level"], config)
    ours = HFTokenizer(ours)
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.convert_tokens_to_ids("nothing") == theirs.convert_tokens_to_ids("nothing")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"mood": "happy"},
        {"continue_final_message": True},
        {"chat_template": "{{ messages[0].content }}"},
    ],
)
def test_the_chat_template_gives_the_same_text_and_the_same_ids(both, options):
    ours, theirs = both
    for conversation in (CHAT, [CHAT, CHAT[1:]]):
        given = ours.apply_chat_template(conversation, tokenize=False, **options)
        assert given == theirs.apply_chat_template(conversation, tokenize=False, **options)
        given = ours.apply_chat_template(conversation, **options)
        expected = theirs.apply_chat_template(conversation, **options)
        assert given["input_ids"] == expected["input_ids"]
        assert given["attention_mask"] == expected["attention_mask"]
        given = ours.apply_chat_template(conversation, return_dict=False, **options)
        assert given == theirs.apply_chat_template(conversation, return_dict=False, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_tensors": "pt"}, ValueError, "return_tensors='pt' is not supported by Quire; what is returned are"),
        ({"padding": True}, ValueError, "padding=True is not supported by Quire"),
        ({"truncation": True, "max_length": 3}, ValueError, "truncation=True is not supported by Quire"),
        ({"add_speical_tokens": True}, TypeError, "unexpected argument 'add_speical_tokens'"),
    ],
)
def test_what_is_missing_is_an_error_that_names_it(both, options, error, message):
    ours, _ = both
    with pytest.raises(error, match=message):
        ours("a", **options)


def test_without_a_chat_template_the_error_says_how_to_give_one(tokenizer):
    with pytest.raises(ValueError, match="no chat template; give one with chat_template"):
        HFTokenizer(tokenizer).apply_chat_template(CHAT)
