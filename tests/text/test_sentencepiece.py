"""tokenizer.model, against SentencePiece itself."""

import io
import json

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaTokenizer

from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.sentencepiece import read_sentencepiece
from quire.text.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. It's hers, isn't it? Don't!",
    "and the cat and the hat and the bat, 1234567890 times",
    "Grüße aus Köln: naïve café, señor, Ångström",
    "def f(x):    return x  # <table> and   spaces",
    "自然言語処理は楽しい。你好，世界！ 안녕하세요",
    "Once upon a time there was a small engine that could read a whole book in one night, and then another one.",
    "To be, or not to be, that is the question: whether it is nobler in the mind to suffer the slings and arrows",
] * 4
AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {
    "llama": {"model_type": "bpe", "vocab_size": 460, "byte_fallback": True, "split_digits": True, **AS_IT_IS},
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 480,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        **AS_IT_IS,
        "user_defined_symbols": ["▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "\t", "<table>"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
    "unigram of bytes": {"model_type": "unigram", "vocab_size": 380, "byte_fallback": True, **AS_IT_IS},
    "unigram": {"model_type": "unigram", "vocab_size": 120},
    "bpe": {"model_type": "bpe", "vocab_size": 230},
}
# No ▁, which users do not write and the added tokens of spaces do not match.
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="▁") | st.sampled_from("abet12'  \n\t<>é中👍🏽"),
    max_size=40,
) | st.sampled_from(["<table>a   <table>", "  def f(x):\n\n\t\treturn      x", "the cat and  the hat", "１２ ½ ﬁ Ⅷ"])


def train(**options) -> bytes:
    file = io.BytesIO()
    options |= {"sentence_iterator": iter(LINES), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(model_writer=file, **options)
    return file.getvalue()


@pytest.fixture(scope="session")
def trained() -> dict[str, bytes]:
    return {kind: train(**options) for kind, options in KINDS.items()}


@pytest.fixture(scope="session", params=KINDS)
def both(request, trained, directory_of) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    data = trained[request.param]
    ours = Tokenizer.from_directory(directory_of({"tokenizer.model": data}))
    return ours, sentencepiece.SentencePieceProcessor(model_proto=data)


@pytest.fixture
def llama(trained, directory_of):
    return lambda **config: Tokenizer.from_directory(
        directory_of({"tokenizer.model": trained["llama"], "tokenizer_config.json": config})
    )


@pytest.mark.sampled(2)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_ids_and_texts_are_those_of_sentencepiece(both, text):
    ours, theirs = both
    assume("<0x" not in text and not any(token in text for token in ours.special_tokens.values()))  # just text to it
    expected = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [theirs.bos_id(), *expected]
    decoded = theirs.decode(expected).replace(" \u2047 ", "<unk>")  # what SentencePiece shows for an unknown token
    if "\u2047" not in text:
        assert ours.decode(expected, skip_special_tokens=False) == decoded


@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_a_stream_of_tokens_gives_the_text(both, text):
    ours, theirs = both
    ids = theirs.encode(text)
    detokenizer = IncrementalDetokenizer(ours, [], skip_special_tokens=False)
    for token_id in ids:
        detokenizer.append([token_id])
    assert detokenizer.flush() == ours.decode(ids, skip_special_tokens=False)


def test_pieces_have_their_ids_and_special_ones_their_names(both):
    ours, theirs = both
    assert ours.vocab_size == theirs.get_piece_size()
    for token_id in range(theirs.get_piece_size()):
        piece = theirs.id_to_piece(token_id)
        assert ours.id_to_token(token_id).replace(" ", "▁") == piece
    assert ours.bos_token_id == theirs.bos_id()
    assert ours.eos_token_id == theirs.eos_id()
    assert ours.special_tokens["unk_token"] == "<unk>"
    assert ours.all_special_ids == {i for i in range(ours.vocab_size) if theirs.is_control(i) or theirs.is_unknown(i)}
    assert ours.encode(f"a{ours.special_tokens['eos_token']}")[-1] == theirs.eos_id()


def test_bos_and_eos_are_added_as_the_configuration_says(llama):
    plain = llama().encode("the cat", add_special_tokens=False)
    assert llama().encode("the cat") == [1, *plain]
    assert llama(add_bos_token=False, add_eos_token=True).encode("the cat") == [*plain, 2]


@pytest.fixture(scope="session", params=[True, False], ids=["prefix", "no prefix"])
def outside_of_legacy_mode(request, trained, directory_of):
    """transformers 5 ranks a model's merges by id, not by score: it gets ours, to compare what it does with spaces."""
    config = {"legacy": False, "add_prefix_space": request.param, "add_bos_token": False}
    path = directory_of({"tokenizer.model": trained["llama"], "tokenizer_config.json": config})
    ours = Tokenizer.from_directory(path)
    backend, _ = read_sentencepiece(trained["llama"], {})
    model = json.loads(backend.to_str())["model"]
    theirs = LlamaTokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]], **config)
    return ours, theirs


@settings(max_examples=80, deadline=None)
@given(text=TEXTS | st.sampled_from(["<s>the cat</s> a</s>b", " <s>", "a <s> <s>b", "<s>  a", "  a", "▁▁a"]))
def test_outside_of_legacy_mode_only_the_beginning_gets_a_space_as_in_transformers(outside_of_legacy_mode, text):
    ours, theirs = outside_of_legacy_mode
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_in_legacy_mode_the_text_after_a_special_token_gets_a_space_too(llama):
    tokenizer = llama(legacy=True)
    assert tokenizer.encode("the</s>the", False) == [
        *tokenizer.encode("the", False),
        2,
        *tokenizer.encode("the", False),
    ]
    assert llama(legacy=False).encode("the</s>the", False) != tokenizer.encode("the</s>the", False)


def test_the_configuration_may_rename_pieces_and_add_tokens_behind_them(llama):
    table = {
        "2": {"content": "<|end|>", "special": True},
        "300": {"content": "<|user|>", "special": True, "rstrip": True},
        "470": {"content": "<tool>", "special": False, "normalized": False},
    }
    tokenizer = llama(added_tokens_decoder=table, eos_token="<|end|>", add_bos_token=False, legacy=False)
    assert tokenizer.encode("<|user|>   <|end|><tool>") == [300, 2, 470]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.vocab_size == 471
    assert tokenizer.all_special_ids == {0, 1, 2, 300}
    assert tokenizer.decode(tokenizer.encode("the cat and")) == "the cat and"


def test_models_that_quire_does_not_know_and_broken_files_are_errors(trained, directory_of):
    def error_of(data: bytes) -> str:
        with pytest.raises(ValueError, match=r"tokenizer.model: ") as error:
            Tokenizer.from_directory(directory_of({"tokenizer.model": data}))
        return str(error.value)

    assert "of words or characters" in error_of(train(model_type="char", vocab_size=100, hard_vocab_limit=False))
    suffixes = train(model_type="bpe", vocab_size=230, treat_whitespace_as_suffix=True)
    assert "treat_whitespace_as_suffix is not supported" in error_of(suffixes)
    assert "cut off" in error_of(trained["llama"][:5000])
    assert "not a SentencePiece model: wire type" in error_of(b"\n\x03\x0b\x0b\x0b")
