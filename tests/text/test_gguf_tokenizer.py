"""GGUF's tokenizers, against the ids that llama.cpp gave: tests/data/record_gguf_tokenizers.py."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from quire.text.bpe import SPLITS
from quire.text.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gguf_tokenizers.json").read_text("utf-8"))
VOCABULARIES = RECORDED["vocabularies"]


def name_of(case: dict) -> str:
    more = [str(value) for value in case["metadata"].values()]
    return " ".join([case["vocabulary"], *more])


@pytest.mark.parametrize("case", RECORDED["cases"], ids=name_of)
def test_ids_are_those_of_llama_cpp(case):
    tokenizer = Tokenizer.from_gguf(VOCABULARIES[case["vocabulary"]] | case["metadata"])
    for text, ids in zip(RECORDED["texts"], case["ids"], strict=True):
        if ids is not None:
            assert tokenizer.encode(text) == ids


def test_each_way_of_splitting_was_recorded():
    recorded = {SPLITS[case["metadata"].get("tokenizer.ggml.pre", "default")] for case in RECORDED["cases"]}
    assert recorded == set(SPLITS.values())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_texts_come_back(vocabulary):
    tokenizer = Tokenizer.from_gguf({"tokenizer.ggml.pre": "gpt-2", **VOCABULARIES[vocabulary]})
    for text in RECORDED["texts"]:
        if "<" not in text:  # special tokens set spaces around them
            text = text.replace("▁", " ") if vocabulary == "llama" else text
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_named_by_their_ids():
    size = len(VOCABULARIES["gpt2"]["tokenizer.ggml.tokens"])
    more = {"padding_token_id": size - 2, "eot_token_id": size - 3, "unknown_token_id": size + 5}
    more |= {"seperator_token_id": np.uint32(size - 2)}
    tokenizer = Tokenizer.from_gguf(VOCABULARIES["gpt2"] | {f"tokenizer.ggml.{key}": i for key, i in more.items()})
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "eot_token": "<s>",
        "sep_token": "</s>",
    }
    assert tokenizer.all_special_ids == {size - 3, size - 2}  # <tool> is the user's
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size - 3, size - 2)
    spm = Tokenizer.from_gguf(VOCABULARIES["llama"])
    assert spm.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_numpy_arrays_serve_as_lists_do():
    metadata = VOCABULARIES["llama"] | {
        "tokenizer.ggml.scores": np.array(VOCABULARIES["llama"]["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(VOCABULARIES["llama"]["tokenizer.ggml.token_type"], np.int32),
        "tokenizer.ggml.add_bos_token": np.bool_(False),
    }
    text = "  Hello world<s>!"
    assert Tokenizer.from_gguf(metadata).encode(text) == Tokenizer.from_gguf(VOCABULARIES["llama"]).encode(text)[1:]


def test_chat_templates_have_their_names():
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    names = {"tokenizer.chat_templates": ["tool_use"]}
    tokenizer = Tokenizer.from_gguf(VOCABULARIES["llama"] | templates | names)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert Tokenizer.from_gguf(VOCABULARIES["llama"]).chat_template is None


@pytest.mark.parametrize("pre", [{}, {"tokenizer.ggml.pre": "no-such-model"}])
def test_an_unknown_way_of_splitting_gives_a_warning_and_the_default(pre, caplog):
    with caplog.at_level(logging.WARNING, "quire"):
        tokenizer = Tokenizer.from_gguf(VOCABULARIES["gpt2"] | pre)
    assert "tokenizer.ggml.pre is" in caplog.text
    default = Tokenizer.from_gguf(VOCABULARIES["gpt2"] | {"tokenizer.ggml.pre": "default"})
    assert [tokenizer.encode(text) for text in RECORDED["texts"]] == [
        default.encode(text) for text in RECORDED["texts"]
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 values for"),
        ({"tokenizer.ggml.merges": ["q zzz"]}, "q and zzz are to be merged, but qzzz is no token"),
        ({"tokenizer.ggml.merges": ["q"]}, "GGUF file's tokenizer: "),
    ],
)
def test_what_cannot_be_understood_is_an_error_that_names_the_key(change, reason):
    with pytest.raises(ValueError, match=reason):
        Tokenizer.from_gguf(VOCABULARIES["gpt2"] | change)
    with pytest.raises(ValueError, match=r"has no tokenizer.ggml.model"):
        Tokenizer.from_gguf({})
