"""A text never becomes fewer tokens than the bound says; tokenizers that may drop or merge text have no bound."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text.length_bound import LengthBound
from quire.text.sentencepiece import Piece, SentencePieceModel

# What normal forms shorten, white space of all kinds, added tokens, long tokens, bytes that are no token.
PIECES = [
    "a", " ", "  ", "\t", "\n", "\u3000", "\u00a0", "\u200b", "\x00", "▁", "the", "ing", "Don't",
    "12345", "中", "한", "👍🏽",
    "\u1fbe\u0308\u0301", "\u1112\u1161\u11ab", "\u212a", "\u1fef", "𝟘", "𝐀\u030a\u0301", "ﬁ", "Ａ",
    "e\u0301", "\u0344",
    "<s>", "</s>", "<|im_start|>", "<tool_call>", "<wide>", " <wide>  ", "<unk>", "<0xE2>", "\ufffd",
    "x" * 40, " " * 40,
]  # fmt: skip
TEXTS = st.lists(
    st.tuples(st.sampled_from(PIECES) | st.text(max_size=3), st.integers(1, 12)).map(lambda part: part[0] * part[1]),
    max_size=12,
).map("".join)


def with_normalizer(backend: Backend, normalizer: normalizers.Normalizer) -> Backend:
    backend.normalizer = normalizer
    return backend


def with_pre_tokenizer(backend: Backend, *before: pre_tokenizers.PreTokenizer) -> Backend:
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def with_added(backend: Backend, **options: bool) -> Backend:
    backend.add_tokens([AddedToken("<wide>", **options)])
    return backend


def unigram_of_bytes() -> Backend:
    pieces = [Piece("<unk>", 0, 2), Piece("▁the", -2, 1), Piece("ing", -3, 1), Piece("▁▁▁▁▁▁▁▁", -3, 1)]
    pieces += [Piece(f"<0x{byte:02X}>", -9, 6) for byte in range(256)]
    return SentencePieceModel(pieces, is_unigram=True, strip_spaces=False).backend({})[0]


Copy = Callable[[str], Backend]
BOUNDED: dict[str, Callable[[Copy], Backend]] = {
    "byte level": lambda copy: copy("byte level"),
    "sentencepiece": lambda copy: copy("sentencepiece"),
    "unigram of bytes": lambda copy: unigram_of_bytes(),
    **{
        form: lambda copy, form=form: with_normalizer(copy("byte level"), getattr(normalizers, form)())
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    },
    "two forms": lambda copy: with_normalizer(
        copy("byte level"), normalizers.Sequence([normalizers.NFKC(), normalizers.NFC()])
    ),
    "strip": lambda copy: with_normalizer(copy("byte level"), normalizers.Strip()),
    "shorter": lambda copy: with_normalizer(copy("byte level"), normalizers.Replace("Don't", "ing")),
    "white space dropped": lambda copy: with_pre_tokenizer(copy("byte level"), pre_tokenizers.WhitespaceSplit()),
    "split": lambda copy: with_pre_tokenizer(
        copy("byte level"), pre_tokenizers.Digits(True), pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    ),
    "greedy to the left": lambda copy: with_added(copy("byte level"), lstrip=True),
    "greedy to the right": lambda copy: with_added(copy("sentencepiece"), rstrip=True, special=True),
    "single unknown": lambda copy: single_unknowns(),
}
UNBOUNDED: dict[str, Callable[[Copy], Backend]] = {
    "unigram": lambda copy: copy("unigram"),
    "word piece": lambda copy: copy("word piece"),
    "lacks a byte": lambda copy: without(copy("byte level"), "!"),
    "lacks a byte to fall back on": lambda copy: without(copy("sentencepiece"), "<0xE2>"),
    "removes": lambda copy: with_pre_tokenizer(copy("byte level"), pre_tokenizers.Split(Regex("a+"), "removed")),
    "replaces by nothing": lambda copy: with_normalizer(copy("byte level"), normalizers.Replace("a", "")),
    "replaces matches": lambda copy: with_normalizer(copy("byte level"), normalizers.Replace(Regex("a+"), "a")),
    "strips accents": lambda copy: with_normalizer(copy("byte level"), normalizers.StripAccents()),
}


def single_unknowns() -> Backend:
    """Each unknown character is one unknown token."""
    tokens = ["<unk>", "a", "t", "h", "e", "th", "the"]
    merges = [("t", "h"), ("th", "e")]
    return Backend(models.BPE({token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>"))


def without(backend: Backend, token: str) -> Backend:
    """The same vocabulary without a token and the merges that need it."""
    state = json.loads(backend.to_str())
    del state["model"]["vocab"][token]
    state["model"]["merges"] = [m for m in state["model"]["merges"] if token not in "".join(m)]
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != token]
    return Backend.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def copy(backends) -> Copy:
    return lambda kind: Backend.from_str(backends[kind].to_str())


@pytest.fixture(scope="session", params=BOUNDED)
def bounded(request, copy) -> tuple[Backend, LengthBound]:
    backend = BOUNDED[request.param](copy)
    bound = LengthBound.of(backend)
    assert bound is not None
    return backend, bound


@pytest.mark.sampled(5)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS)
def test_no_text_becomes_fewer_tokens_than_the_bound_says(bounded, text):
    backend, bound = bounded
    assert len(backend.encode(text, add_special_tokens=False).ids) >= bound.fewest_tokens(text)


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_tokenizers_that_drop_or_merge_text_have_no_bound(copy, kind):
    assert LengthBound.of(UNBOUNDED[kind](copy)) is None


def test_the_bound_is_the_longest_token(copy):
    backend = copy("byte level")
    longest = max(backend.get_vocab().values(), key=lambda i: len(backend.id_to_token(i)))
    assert LengthBound.of(backend) == (len(backend.id_to_token(longest)), True)
    backend.add_tokens(["中" * 30])
    assert LengthBound.of(backend) == (90, True)
    assert LengthBound(4, True).fewest_tokens("abcde") == 2
    assert LengthBound(4, True).fewest_tokens("中中") == 2
    assert LengthBound(4, False).fewest_tokens(" abcd \n") == 1
    assert LengthBound(4, True).fewest_tokens("") == 0


def longest_equivalents(form: str, decomposed: str) -> Iterator[tuple[str, int]]:
    """(character in normal form, bytes of the longest text with that form), for all of Unicode."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    longest: dict[str, int] = {}
    for character in characters:
        parts = unicodedata.normalize(decomposed, character)
        longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    for character in characters:
        if unicodedata.normalize(form, character) == character:
            parts, best = unicodedata.normalize(decomposed, character), [0]
            for end in range(1, len(parts) + 1):
                best.append(max(best[at] + longest[parts[at:end]] for at in range(end) if parts[at:end] in longest))
            yield character, best[-1]


@pytest.mark.sampled(4)
@pytest.mark.nightly
@pytest.mark.parametrize(("form", "decomposed"), [("NFC", "NFD"), ("NFKC", "NFKD"), ("NFD", "NFD"), ("NFKD", "NFKD")])
def test_no_normal_form_shortens_text_more_than_fourfold(form, decomposed):
    assert max(size / len(character.encode()) for character, size in longest_equivalents(form, decomposed)) <= 4
