"""Files of ranks, against tiktoken itself."""

import base64
import json
import unicodedata

import pytest
import tiktoken
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.text.token_bytes import BYTE_OF_CHARACTER
from quire.text.tokenizer import Tokenizer

WORD = r"[^\r\n\p{L}\p{N}]?"
LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LAST}"
QWEN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LAST}"
NOT_HAN, CONTRACTION = r"&&[^\p{Han}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = (
    rf"[\p{{Han}}]+|{WORD}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{NOT_HAN}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{NOT_HAN}]+"
    rf"{CONTRACTION}|{WORD}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{NOT_HAN}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{NOT_HAN}]*"
    rf"{CONTRACTION}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LAST}"
)
FAMILIES = {  # class: pattern, whether texts are composed first
    "PreTrainedTokenizerFast": (LLAMA_3, False),
    "QWenTokenizer": (QWEN, True),
    "TikTokenTokenizer": (KIMI, False),
}
TEXTS = (
    st.text()
    | st.text("aetAE12 '\n\r\tslé\u0301中日👍🏽_/.", max_size=40)
    | st.just("It's 12345 the   café\n\n 自然言語")
)


@pytest.fixture(scope="session")
def ranks(backends) -> dict[bytes, int]:
    model = json.loads(backends["byte level"].to_str())["model"]
    spelled = [token for token in sorted(model["vocab"], key=model["vocab"].get) if not token.startswith("<")]
    tokens = [bytes(map(BYTE_OF_CHARACTER.get, token)) for token in [*spelled, "<"]]
    # No merges lead to these, but they may be a word as a whole.
    tokens += [b"not-in-tekken", b"nor this", b"xyzzy", b" unreachable", "日本".encode()]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture(scope="session", params=FAMILIES)
def both(request, ranks, directory_of):
    pattern, composed = FAMILIES[request.param]
    special = {"<|begin|>": len(ranks) + 3, "<|end|>": len(ranks) + 1}
    listed = {str(token_id): {"content": token, "special": True} for token, token_id in special.items()}
    config = {"tokenizer_class": request.param, "added_tokens_decoder": listed, "bos_token": "<|begin|>"}
    name = {"QWenTokenizer": "qwen.tiktoken", "TikTokenTokenizer": "tiktoken.model"}.get(
        request.param, "tokenizer.model"
    )
    path = directory_of({name: tiktoken_lines(ranks), "tokenizer_config.json": {**config, "add_bos_token": True}})
    reference = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer.from_directory(path), reference, composed


@pytest.mark.sampled(3)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_tiktoken(both, text):
    ours, reference, composed = both
    expected = reference.encode(unicodedata.normalize("NFC", text) if composed else text, allowed_special="all")
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [ours.bos_token_id, *expected]
    assert ours.decode(expected, skip_special_tokens=False) == reference.decode(expected)


def test_a_word_that_no_merges_lead_to_and_special_tokens_are_found(both, ranks):
    ours, reference, _ = both
    text = " unreachable<|end|>日本"
    assert ours.encode(text, False) == reference.encode(text, allowed_special="all")
    assert ours.encode(text, False) == [len(ranks) - 2, len(ranks) + 1, len(ranks) - 1]


def tekken(ranks: dict[bytes, int], special_tokens: list[str] | None, count: int, pattern: str) -> dict[str, object]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    size = {"num_vocab_tokens": len(ranks), "default_vocab_size": len(ranks) - 5 + count}
    file = {
        "config": {"pattern": pattern, **size, "default_num_special_tokens": count, "version": "v7"},
        "vocab": vocab,
    }
    if special_tokens is not None:
        ranked = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special_tokens)]
        file["special_tokens"] = ranked[::-1]
    return file


@pytest.fixture(scope="session")
def tekken_and_reference(ranks, directory_of):
    """The file says that the last five of its tokens do not count."""
    path = directory_of({"tekken.json": tekken(ranks, ["<unk>", "<s>", "</s>", "[INST]"], 10, LLAMA_3)})
    kept = dict(list(ranks.items())[:-5])
    reference = tiktoken.Encoding("test", pat_str=LLAMA_3, mergeable_ranks=kept, special_tokens={})
    return Tokenizer.from_directory(path), reference


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_tekken_gives_the_ids_of_tiktoken_behind_the_special_tokens(tekken_and_reference, text):
    tokenizer, reference = tekken_and_reference
    assume(not any(token in text for token in tokenizer.added_tokens.values()))
    expected = [1, *(token_id + 10 for token_id in reference.encode(text))]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_tekken_s_special_tokens_are_known_by_name_and_the_free_ones_have_names(tekken_and_reference):
    tokenizer, _ = tekken_and_reference
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("[INST]<SPECIAL_9></s>", False) == [3, 9, 2]
    assert tokenizer.all_special_ids == set(range(10))


def test_an_early_tekken_file_does_not_name_its_special_tokens(ranks, directory_of):
    tokenizer = Tokenizer.from_directory(directory_of({"tekken.json": tekken(ranks, None, 30, LLAMA_3)}))
    assert tokenizer.encode("<s>[INST][/INST]<pad>[TOOL_CONTENT]<SPECIAL_20>", False) == [1, 3, 4, 11, 19, 20]


def test_broken_files_are_errors_that_name_them(directory_of):
    with pytest.raises(ValueError, match=r"tokenizer.model: line 2 is not a token in base64 and its rank"):
        Tokenizer.from_directory(directory_of({"tokenizer.model": "YQ== 0\nYg==\n"}))
    with pytest.raises(ValueError, match=r"tekken.json: .*missing required field `pattern`"):
        Tokenizer.from_directory(directory_of({"tekken.json": {"config": {}, "vocab": []}}))
