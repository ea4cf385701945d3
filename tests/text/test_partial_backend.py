"""A tokenizer with the tokens of a text alone gives what one with the whole vocabulary gives."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.text import gguf_tokenizer, partial_backend
from quire.text.bpe import SPLITS
from quire.text.hf_tokenizer import HFTokenizer
from quire.text.partial_backend import PartialBackend
from quire.text.sentencepiece import Kind
from quire.text.tokenizer import Tokenizer
from support.waiting import eventually

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gguf_tokenizers.json").read_text("utf-8"))
VOCABULARIES = RECORDED["vocabularies"]
LLAMA = VOCABULARIES["llama"]
GGML = "tokenizer.ggml"
SPACES = {  # as Gemma has them: tokens of spaces and of line breaks, and one that is empty
    f"{GGML}.tokens": [*LLAMA[f"{GGML}.tokens"], "▁" * 19, "▁" * 18, "\n", "\n\n", ""],
    f"{GGML}.token_type": [*LLAMA[f"{GGML}.token_type"], *[int(Kind.USER_DEFINED)] * 5],
    f"{GGML}.scores": [*LLAMA[f"{GGML}.scores"], *[0.0] * 5],
}
CASES: dict[str, dict[str, Any]] = {
    **{f"gpt2 {pre}": VOCABULARIES["gpt2"] | {f"{GGML}.pre": pre} for pre in SPLITS},
    "llama": LLAMA,
    "llama without a prefix": LLAMA | {f"{GGML}.add_space_prefix": False, f"{GGML}.add_eos_token": True},
    "phi3": LLAMA | {"general.architecture": "phi3"},
    "spaces": LLAMA | SPACES,
    "spaces without a prefix": LLAMA | SPACES | {f"{GGML}.add_space_prefix": False},
    "an unknown token elsewhere": LLAMA | {f"{GGML}.unknown_token_id": 300},
    "no unknown token": LLAMA | {f"{GGML}.unknown_token_id": 10**6},
}


@pytest.fixture
def small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_LARGE", 0)


def both(metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Tokenizer, Tokenizer]:
    """One with parts of the vocabulary, and one with the whole."""
    monkeypatch.setattr(gguf_tokenizer, "_LARGE", 0)
    partial = Tokenizer.from_gguf(metadata)
    monkeypatch.setattr(gguf_tokenizer, "_LARGE", 1 << 60)
    whole = Tokenizer.from_gguf(metadata)
    assert isinstance(partial._backend, PartialBackend)
    assert not isinstance(whole._backend, PartialBackend)
    monkeypatch.setattr(partial_backend, "_MOST_CHARACTERS", 1 << 60)
    monkeypatch.setattr(partial_backend, "_MOST_DECODED", 1 << 60)
    return partial, whole


def texts_of(metadata: dict[str, Any], count: int) -> list[str]:
    draw, tokens = random.Random(1), [str(token) for token in metadata[f"{GGML}.tokens"]]
    spelled = [token.replace("▁", " ").replace("Ġ", " ") for token in tokens]
    alphabets = [
        tokens,
        spelled,
        [*"  \n\tabc.1'é\u0301\u4e00\N{PILE OF POO}\0"],
        [" ", "  ", "   ", "\n", "\n\n", "a"],
    ]
    made = ["".join(draw.choices(draw.choice(alphabets), k=draw.randrange(12))) for _ in range(count)]
    added = [token for token, kind in zip(tokens, metadata[f"{GGML}.token_type"], strict=True) if kind in (2, 3, 4)]
    mixed = ["".join(draw.choices([*added, " ", "a", " word"], k=6)) for _ in range(count // 4)]
    return ["", *RECORDED["texts"], *made, *mixed]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_are_those_of_the_whole_vocabulary(case, monkeypatch):
    partial, whole = both(CASES[case], monkeypatch)
    for text in texts_of(CASES[case], 60):
        ids = whole.encode(text)
        assert partial.encode(text) == ids
        assert partial.encode(text, add_special_tokens=False) == whole.encode(text, add_special_tokens=False)
        assert partial.pieces(text, True) == whole.pieces(text, True)
        assert partial.shortened(text, 3) == whole.shortened(text, 3)
        for skip in (False, True):
            assert partial.decode(ids, skip) == whole.decode(ids, skip)
        assert [partial.token_bytes[i] for i in ids] == [whole.token_bytes[i] for i in ids]
        parts = text, text[:5], 9
        assert partial.encode_parts(*parts) == whole.encode_parts(*parts)
    assert partial._backend._complete is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_facts_are_those_of_the_whole_vocabulary(case, monkeypatch):
    partial, whole = both(CASES[case], monkeypatch)
    names = "special_tokens extra_special_tokens all_special_ids added_tokens chat_templates bos_token_id eos_token_id"
    for name in [*names.split(), "length_bound", "longest_quick"]:
        assert getattr(partial, name) == getattr(whole, name), name
    size = len(CASES[case][f"{GGML}.tokens"])
    assert [partial.id_to_token(i) for i in range(size + 2)] == [whole.id_to_token(i) for i in range(size + 2)]
    for token in [*CASES[case][f"{GGML}.tokens"], "  ", " ", "no such token"]:
        assert partial.token_to_id(token) == whole.token_to_id(token)
    assert [partial.count(added) for added in (False, True)] == [whole.count(added) for added in (False, True)]
    assert partial.token_bytes._anchor == whole.token_bytes._anchor
    assert partial._backend._complete is None
    assert partial.get_vocab() == whole.get_vocab()
    assert partial.vocab_size == whole.vocab_size
    assert partial._backend.to_str() == whole._backend.to_str()


def test_what_is_no_text_is_refused_as_ever(monkeypatch):
    for name in ("gpt2", "llama"):
        for metadata in (VOCABULARIES[name], VOCABULARIES[name] | SPACES if name == "llama" else VOCABULARIES[name]):
            for wrong in ("a\ud800", "<s>\udfff", 3, None):
                errors = []
                for tokenizer in both(metadata, monkeypatch):
                    with pytest.raises(ValueError) as error:  # noqa: PT011
                        tokenizer.encode(wrong)
                    errors.append(str(error.value))
                assert errors[0] == errors[1]


def test_ids_without_a_token_are_left_out(monkeypatch):
    for name in ("gpt2", "llama"):
        partial, whole = both(VOCABULARIES[name], monkeypatch)
        for ids in ([10**6], [300, 10**6, 301], []):
            assert partial.decode(ids) == whole.decode(ids)


@pytest.mark.usefixtures("small_too")
def test_many_texts_or_tokens_are_a_reason_for_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(partial_backend, "_MOST_CHARACTERS", 100)
    monkeypatch.setattr(partial_backend, "_MOST_DECODED", 20)
    tokenizer = Tokenizer.from_gguf(LLAMA)
    ids = [tokenizer.encode("some words and more of them") for _ in range(10)]
    assert tokenizer._backend._complete is not None
    assert all(each == ids[0] for each in ids)
    tokenizer = Tokenizer.from_gguf(LLAMA)
    texts = [tokenizer.decode(ids[0]) for _ in range(30)]
    assert tokenizer._backend._complete is not None
    assert set(texts) == {texts[0]}


@pytest.mark.usefixtures("small_too")
def test_so_is_one_long_text_without_splits(monkeypatch):
    monkeypatch.setattr(partial_backend, "_MOST_PARTS", 1000)
    tokenizer = Tokenizer.from_gguf(LLAMA)
    assert tokenizer.decode(tokenizer.encode("ab" * 500)) == "ab" * 500
    assert tokenizer._backend._complete is not None


@pytest.mark.usefixtures("small_too")
def test_a_server_makes_the_whole_vocabulary_beside_its_requests():
    tokenizer = Tokenizer.from_gguf(LLAMA)
    before = tokenizer.encode("Once upon a time")
    tokenizer.prepare()
    eventually(lambda: tokenizer._backend._complete is not None)
    assert tokenizer.encode("Once upon a time") == before


@pytest.mark.usefixtures("small_too")
def test_threads_make_it_once(monkeypatch):
    tokenizer, made = Tokenizer.from_gguf(LLAMA), []
    make = tokenizer._backend._make_complete
    monkeypatch.setattr(tokenizer._backend, "_make_complete", lambda: made.append(0) or make())
    threads = [threading.Thread(target=tokenizer.get_vocab) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [0]


@pytest.mark.parametrize(
    "change",
    [
        {f"{GGML}.tokens": [*LLAMA[f"{GGML}.tokens"][:-1], LLAMA[f"{GGML}.tokens"][300]]},  # twice the same
        {f"{GGML}.tokens": [*LLAMA[f"{GGML}.tokens"][:-1], "x" * 2000]},
        {f"{GGML}.scores": [float("nan")] * len(LLAMA[f"{GGML}.tokens"])},
        {f"{GGML}.tokens": [*SPACES[f"{GGML}.tokens"][:-1], " " * 19], **{k: SPACES[k] for k in list(SPACES)[1:]}},
    ],
)
@pytest.mark.usefixtures("small_too")
def test_an_unusual_vocabulary_is_given_to_the_library_at_once(change):
    tokenizer = Tokenizer.from_gguf(LLAMA | change)
    assert not isinstance(tokenizer._backend, PartialBackend)
    assert tokenizer.encode("Once upon a time")


@pytest.mark.usefixtures("small_too")
@pytest.mark.parametrize(
    ("merges", "reason"),
    [
        (["q zzz"], "q and zzz are to be merged, but qzzz is no token"),
        (["q"], "'q' is no merge of two tokens"),
        (["q "], "'' is to be merged, but is no token"),
        (["< tool>"], "'tool>' is to be merged, but is no token"),
    ],
)
def test_wrong_merges_are_errors(merges, reason):
    with pytest.raises(ValueError, match=reason):
        Tokenizer.from_gguf(VOCABULARIES["gpt2"] | {f"{GGML}.pre": "gpt-2", f"{GGML}.merges": merges})


def test_numpy_arrays_and_hugging_faces_interface_work(monkeypatch):
    arrays = {f"{GGML}.{key}": np.array(LLAMA[f"{GGML}.{key}"]) for key in ("scores", "token_type")}
    partial, whole = (HFTokenizer(t, None, "name") for t in both(LLAMA | arrays, monkeypatch))
    text = "Hello<s> world"
    assert partial.tokenize(text) == whole.tokenize(text)
    assert len(partial) == len(whole)
    assert partial.get_vocab() == whole.get_vocab()
    assert partial.convert_ids_to_tokens([5, 300]) == whole.convert_ids_to_tokens([5, 300])
