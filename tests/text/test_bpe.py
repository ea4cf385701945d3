"""vocab.json with merges.txt, against transformers; ways of splitting, against those that transformers knows."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from quire.text.bpe import SPLITS, merges_of
from quire.text.tokenizer import Tokenizer

TEXTS = (
    st.text()
    | st.text("abAB12 '\n\r\tstlé\u0301\u0308中👍🏽_/.▁")
    | st.sampled_from(["</s>a<pad> b</s>", "<|im_start|>user\nhi<|im_end|>", "I'M you're  12345   x\n\n y", "<think>a"])
)


@pytest.fixture(scope="session")
def trained(backends) -> tuple[dict[str, int], str]:
    """A vocabulary without special tokens, and the text of merges.txt."""
    model = json.loads(backends["byte level"].to_str())["model"]
    tokens = [token for token in sorted(model["vocab"], key=model["vocab"].get) if not token.startswith("<")]
    merges = "\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"] if "<" not in merge[0])])
    return {token: token_id for token_id, token in enumerate([*tokens, "<"])}, merges


def added(content: str) -> dict[str, object]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def opt_files(vocab: dict[str, int], merges: str) -> dict[str, object]:
    """The layout of facebook/opt-125m: everything but the weights."""
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    named = {"bos_token": added("</s>"), "eos_token": added("</s>"), "unk_token": added("</s>")}
    return {
        "config.json": {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
        "vocab.json": special | {token: token_id + 4 for token, token_id in vocab.items()},
        "merges.txt": merges,
        "special_tokens_map.json": {**named, "pad_token": added("<pad>")},
        "tokenizer_config.json": {
            "errors": "replace",
            **named,
            "add_prefix_space": False,
            "add_bos_token": True,
            "pad_token": added("<pad>"),
            "special_tokens_map_file": None,
            "name_or_path": "opt-30b",
            "tokenizer_class": "GPT2Tokenizer",
        },
    }


def qwen_files(vocab: dict[str, int], merges: str) -> dict[str, object]:
    start = len(vocab)
    special = {name: start + i for i, name in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    tokens = {str(i): {**added(name), "normalized": False, "special": True} for name, i in special.items()}
    tokens[str(start + 3)] = {**added("<think>"), "normalized": False, "special": False}
    for token in tokens.values():
        del token["__type"]
    return {
        "config.json": {"model_type": "qwen2"},
        "vocab.json": vocab,
        "merges.txt": merges,
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": tokens,
            "bos_token": None,
            "unk_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_prefix_space": False,
        },
    }


def gpt_2_files(vocab: dict[str, int], merges: str) -> dict[str, object]:
    vocab = {**vocab, "<|endoftext|>": len(vocab)}
    return {"config.json": {"model_type": "gpt2"}, "vocab.json": vocab, "merges.txt": merges}


def gpt_2_files_with_prefix(vocab: dict[str, int], merges: str) -> dict[str, object]:
    return {
        **gpt_2_files(vocab, merges),
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    }


LAYOUTS = [opt_files, qwen_files, gpt_2_files, gpt_2_files_with_prefix]


@pytest.fixture(scope="session", params=LAYOUTS, ids=lambda files: files.__name__)
def both(request, trained, directory_of):
    path = directory_of(request.param(*trained))
    return Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)


@settings(max_examples=30, deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_vocab_and_merges_mean_what_they_mean_to_transformers(both, text, add_special_tokens):
    ours, theirs = both
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_their_special_tokens_are_those_of_transformers(both):
    ours, theirs = both
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= ours.all_special_ids
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


def test_opt_125m_begins_each_text_with_its_end_token(trained, directory_of):
    tokenizer = Tokenizer.from_directory(directory_of(opt_files(*trained)))
    assert tokenizer.encode("the cat")[0] == tokenizer.eos_token_id == 2
    assert tokenizer.encode("the cat") == [2, *tokenizer.encode("the cat", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    assert tokenizer.token_to_id("<pad>") == 1
    assert tokenizer.all_special_ids == {1, 2}


def test_added_tokens_have_the_ids_that_the_table_gives_them(trained, directory_of):
    files = qwen_files(*trained)
    table = files["tokenizer_config.json"]["added_tokens_decoder"]
    table["1000"] = {"content": "<late>", "special": True}
    tokenizer = Tokenizer.from_directory(directory_of(files))
    assert tokenizer.encode("<late><|im_end|>") == [1000, len(trained[0]) + 2]
    assert tokenizer.decode([1000, 999], skip_special_tokens=False) == "<late>"
    assert tokenizer.vocab_size == 1001


def test_added_tokens_json_counts_where_the_configuration_has_no_table(trained, directory_of):
    vocab, merges = trained
    ids = {"<|endoftext|>": len(vocab), "<|im_end|>": len(vocab) + 2, "<think>": len(vocab) + 1}
    config = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_end|>"]}
    files = {"vocab.json": vocab, "merges.txt": merges, "added_tokens.json": ids, "tokenizer_config.json": config}
    tokenizer = Tokenizer.from_directory(directory_of(files | {"config.json": {"model_type": "qwen2"}}))
    assert tokenizer.encode("<think><|im_end|><|endoftext|>") == [len(vocab) + 1, len(vocab) + 2, len(vocab)]
    assert tokenizer.all_special_ids == {len(vocab), len(vocab) + 2}


def test_merges_without_a_vocabulary_or_with_unknown_tokens_are_errors_that_name_the_file(directory_of):
    with pytest.raises(ValueError, match=r"merges.txt: there is no vocab.json beside it"):
        Tokenizer.from_directory(directory_of({"merges.txt": "a b"}))
    with pytest.raises(ValueError, match=r"merges.txt: a and b are to be merged, but ab is no token"):
        Tokenizer.from_directory(directory_of({"vocab.json": {"a": 0, "b": 1}, "merges.txt": "a b"}))
    with pytest.raises(ValueError, match=r"merges.txt: "):
        Tokenizer.from_directory(directory_of({"vocab.json": "[", "merges.txt": "a b"}))


def join_what_comes_first(text: str, tokens: list[str]) -> list[str]:
    """BPE by ranks: the pair whose union has the lowest one is joined, the leftmost of equals, until there is none."""
    parts = list(text)
    while True:
        unions = [(tokens.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in tokens]
        if not unions:
            return parts
        _, at = min(unions)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_merges_from_ranks_join_what_the_ranks_join(data):
    tokens = list("abc")
    for _ in range(data.draw(st.integers(0, 14))):
        union = data.draw(st.sampled_from(tokens)) + data.draw(st.sampled_from(tokens))
        if union not in tokens:
            tokens.append(union)
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges_of(tokens)))
    text = data.draw(st.text("abc", max_size=16))
    assert backend.encode(text).tokens == join_what_comes_first(text, tokens)


def splitter(splits: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated") for split in splits])


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_texts_are_split_as_transformers_splits_them_for_the_same_name(text):
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    ours = {name: splits for name, splits in SPLITS.items() if name in known}
    assert len(ours) > 15
    for splits, pattern in {(splits, known[name]) for name, splits in ours.items()}:
        assert splitter(splits).pre_tokenize_str(text) == splitter((pattern,)).pre_tokenize_str(text)
