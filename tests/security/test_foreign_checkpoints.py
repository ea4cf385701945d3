# ruff: noqa: E501  (expressions)
"""Files of a checkpoint that would hang or bloat an engine: they are refused when it starts, with an error that names
the file and the field."""

from __future__ import annotations

import base64
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.hub import bundled_model, resolve
from quire.checkpoints.weights import WeightError, open_checkpoint
from quire.engine.llm import LLM
from quire.platform.untrusted.limits import Limits
from quire.text import encoding
from quire.text.bpe import SPLITS
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_check import check_expression, is_quadratic
from support.attacks import attack, check_refused, witness
from support.odd_files import ODD_FILES, replace_file
from support.server import Host


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(bundled_model(), tmp_path / "model")


def _change_tokenizer(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---- files that are no files


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_an_engine_does_not_start_with_what_is_no_regular_file(checkpoint: Path, name: str, kind: str) -> None:
    error = replace_file(checkpoint / name, kind)
    with pytest.raises(ModelNotFoundError, match=re.escape(error)):
        LLM(checkpoint)


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "part", "pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_weights_that_are_no_regular_file_are_refused(checkpoint: Path, name: str, kind: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    error = replace_file(checkpoint / name, kind)
    if name == "part":
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(WeightError, match=re.escape(error)):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_tokenizer_that_is_no_regular_file_is_refused(checkpoint: Path, name: str, kind: str) -> None:
    error = replace_file(checkpoint / name, kind)
    with pytest.raises(ValueError, match=re.escape(error)):
        Tokenizer.from_directory(checkpoint)


def test_links_to_files_are_files(checkpoint: Path) -> None:
    for file in list(checkpoint.iterdir()):
        shutil.move(file, checkpoint.parent / file.name)
        file.symlink_to(checkpoint.parent / file.name)
    assert resolve(str(checkpoint)) == checkpoint


def test_deep_json_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelNotFoundError, match=r"config.json is not valid JSON"):
        LLM(checkpoint)


# ---- tokenizers

_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def _charsmap(longest: int) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"ab\0" + b"a" * longest + b"\0").decode()


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "doubling": (
        {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 60}},
        "normalizer.normalizers[6] may make a text more than 64 times as long",
    ),
    "sequences in sequences": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [_DOUBLE] * 5}] * 5}},
        "may make a text more than 64 times as long",
    ),
    "doubling in the decoder": (
        {"decoder": {"type": "Sequence", "decoders": [_DOUBLE] * 60}},
        "decoder.decoders[6] may make a text more than 64 times as long",
    ),
    "an empty pattern": (
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 99}},
        "normalizer may make a text more than 64 times as long",
    ),
    "a long replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 10_001}},
        "normalizer.content has 10,001 characters",
    ),
    "a table of long texts": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": _charsmap(90)}},
        "normalizer may make a text more than 64 times as long",
    ),
    "a repetition within a repetition": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+!"}, "behavior": "Isolated", "invert": False}},
        "pre_tokenizer.pattern '(a+)+!' has a repetition within a repetition",
    ),
    "a slow replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": ""}},
        "normalizer.pattern '(a|a)*$' has a repetition within a repetition",
    ),
    "many steps": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 999}},
        "normalizer has more than 200 steps",
    ),
    "long words": (
        {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {"a": 0}, "unk_token": "a"}},
        "model.max_input_chars_per_word is 1,000,000,000",
    ),
    "long pieces": ({"model": {"type": "Unigram", "vocab": [["a" * 2001, 0.0]]}}, "model.vocab has a piece of 2,001"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_whose_steps_may_not_end_is_refused(checkpoint: Path, name: str) -> None:
    changes, error = BOMBS[name]
    _change_tokenizer(checkpoint, **changes)
    with pytest.raises(ValueError, match=rf"cannot read .*tokenizer.json: .*{re.escape(error)}"):
        Tokenizer.from_directory(checkpoint)


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+b",
        "((a+)+)b",
        "((a|b)+)*c",
        "(a|a)*$",
        "(a?a)*b",
        "(a{1,9}){1,9}b",
        "(?:(?:a?)*+)*+",
        "(a{0,99}){5}b",
        ".*.*x",
        "a*a*a*b",
        r"(\w+)\1",
        r"(?:(?:a*)*)*b",
        "(?=(a+)+b)",
        "(?i:(x+x+)+y)",
        "(a+)+(?!b)",
        r"(a+)+\b",
        "[[a]b]*[ab]*c",
        "(" * 60 + "a" + ")" * 60,
        "[" * 60,
        "(?(1)a|b)",
        "\\",
    ],
)
def test_an_expression_that_may_take_forever_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^(has|lacks|repeats|refers|ends) "):
        check_expression(expression)


@pytest.mark.parametrize(
    "expression",
    [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
        r"(?:\r?\n)+",
        "[一-龥぀-ゟ゠-ヿ]+",
        "^ +| +$",
        " {2,}",
        r"(?<=\d)(?=[a-z])",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    ],
)
def test_expressions_of_published_tokenizers_are_accepted(expression: str) -> None:
    check_expression(expression)


def test_the_expressions_of_known_families_are_accepted() -> None:
    for expressions in SPLITS.values():
        for expression in expressions:
            check_expression(expression)


# ---- expressions of quadratic time

_SLOW = {"type": "Split", "pattern": {"Regex": "(?:ab)*c|."}, "behavior": "Isolated", "invert": False}
_MANY_WORDS = "ab" * 200_000  # takes the library minutes


def _as_if_slow(checkpoint: Path, pattern: str) -> Tokenizer:
    """The bundled tokenizer with another step before its own, which changes no split."""
    own = json.loads((checkpoint / "tokenizer.json").read_text())["pre_tokenizer"]
    step = _SLOW | {"pattern": {"Regex": pattern}}
    _change_tokenizer(checkpoint, pre_tokenizer={"type": "Sequence", "pretokenizers": [step, own]})
    return Tokenizer.from_directory(checkpoint)


def test_usual_tokenizers_encode_here() -> None:
    assert Tokenizer.from_directory(bundled_model()).longest_quick is None
    for expressions in SPLITS.values():
        assert not any(map(is_quadratic, expressions))
    llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    assert not is_quadratic(llama)
    for expression in ("(?:ab)*c|.", r"\s*[\r\n]+|.", "a+b|a+", r"\s+(?!\S)|a*b"):
        assert is_quadratic(expression)


def test_a_long_prompt_of_a_slow_tokenizer_is_bounded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_LIMITS", Limits(cpu_seconds=0.3, memory_bytes=1 << 30, total_seconds=600.0))
    tokenizer = _as_if_slow(checkpoint, "(?:ab)*c|.")
    assert tokenizer.longest_quick == encoding.SHORT_TEXT
    for method in (tokenizer.encode, tokenizer.encode_parts, tokenizer.pieces):
        with pytest.raises(ValueError, match=r"the prompt takes too long to tokenize: it needs more than 0.3 s"):
            method(_MANY_WORDS, None if method == tokenizer.encode_parts else False)


@pytest.mark.slow
def test_a_slow_prompt_is_a_400_and_other_streams_go_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_slow(checkpoint, "(?:ab)*c|.")
    host = Host(model=str(checkpoint), dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
    try:
        service = host.serve()
        monkeypatch.setattr(encoding, "_LIMITS", Limits(cpu_seconds=0.005, memory_bytes=1 << 30, total_seconds=600.0))
        prompt = "ab" * 3_000
        messages = [{"role": "user", "content": prompt}]
        with witness(service):
            answers = attack(service, "/v1/completions", [{"prompt": prompt, "max_tokens": 1}] * 4)
            answers += attack(service, "/v1/chat/completions", [{"messages": messages, "max_tokens": 1}] * 4)
            answers += attack(service, "/tokenize", [{"prompt": prompt}])
        fields = ["prompt"] * 4 + ["messages"] * 4 + ["prompt"]
        for answer, field in zip(answers, fields, strict=True):
            assert "takes too long to tokenize" in check_refused(answer, 400)
            assert answer.error["param"] == field
    finally:
        host.close()


def test_a_slow_tokenizer_makes_the_same_tokens(checkpoint: Path) -> None:
    usual, slow = (
        Tokenizer.from_directory(bundled_model()),
        _as_if_slow(checkpoint, "(?:ab)*\0\0|[\0-\U0010ffff]{1,9999}"),
    )
    for text in ("Once upon a time", "Once upon a time there was a <|im_start|> dragon.\n" * 100):
        assert slow.encode(text) == usual.encode(text)
        assert slow.encode(text, add_special_tokens=False) == usual.encode(text, add_special_tokens=False)
        assert slow.encode_parts(text, text[::-1], 100) == usual.encode_parts(text, text[::-1], 100)
        assert slow.pieces(text, False) == usual.pieces(text, False)
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        slow.encode("\ud800" * 3_000)


def test_a_slow_expression_of_a_decoder_is_refused(checkpoint: Path) -> None:
    step = {"type": "Replace", "pattern": {"Regex": "a*b"}, "content": ""}
    _change_tokenizer(checkpoint, decoder={"type": "Sequence", "decoders": [step]})
    with pytest.raises(ValueError, match=r"decoder.decoders\[0\].pattern 'a\*b' could take quadratic time"):
        Tokenizer.from_directory(checkpoint)


# ---- SentencePiece and tekken


def _field(number: int, value: bytes) -> bytes:
    size, length = len(value), b""
    while size >= 128:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def _sentencepiece(checkpoint: Path, *pieces: str, charsmap: bytes = b"", is_bpe: bool = False) -> None:
    (checkpoint / "tokenizer.json").unlink()
    data = b"".join(_field(1, _field(1, piece.encode())) for piece in ("<unk>", "a", *pieces))
    (checkpoint / "tokenizer.model").write_bytes(
        data + _field(2, bytes([3 << 3, 1 + is_bpe])) + _field(3, _field(2, charsmap))
    )


@pytest.mark.parametrize(
    ("pieces", "charsmap", "error"),
    [
        (
            (),
            base64.b64decode(_charsmap(90)),
            "normalizer_spec.precompiled_charsmap may make a text more than 64 times",
        ),
        (("a" * 2_001,), b"", "it has a piece of 2,001 characters; at most 2,000 are allowed"),
        (tuple(f"{i}" + "a" * 1_990 for i in range(300)), b"", "its tokens are too long"),
    ],
    ids=["table", "piece", "pieces"],
)
def test_a_sentencepiece_model_that_bloats_texts_is_refused(
    checkpoint: Path, pieces: tuple[str, ...], charsmap: bytes, error: str
) -> None:
    _sentencepiece(checkpoint, *pieces, charsmap=charsmap, is_bpe=True)
    with pytest.raises(ValueError, match=f"cannot read .*tokenizer.model: {error}"):
        Tokenizer.from_directory(checkpoint)


def test_spaces_take_a_sentencepiece_model_no_quadratic_time(checkpoint: Path) -> None:
    _sentencepiece(checkpoint, "▁")
    tokenizer = Tokenizer.from_directory(checkpoint)
    assert tokenizer.longest_quick is None
    assert tokenizer.pieces("   a" + " " * 1_000_000 + "a   ", False) == tokenizer.pieces("a a", False)


def test_a_slow_expression_of_tekken_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    config = {"pattern": "(a+)+b", "default_vocab_size": 2, "default_num_special_tokens": 1}
    (checkpoint / "tekken.json").write_text(json.dumps({"config": config, "vocab": []}))
    with pytest.raises(ValueError, match=r"tekken.json: config.pattern '\(a\+\)\+b' has a repetition within"):
        Tokenizer.from_directory(checkpoint)


_PART = st.sampled_from(["a", "b", ".", "[ab]", "[^b]", "(?!b)", "$", r"\b", "aa", "ab"])
_SIGN = st.sampled_from(["", "*", "+", "?", "{1,3}", "{2,}", "+?", "*+"])
_EXPRESSION = st.recursive(
    st.tuples(_PART, _SIGN).map("".join),
    lambda e: (
        st.lists(e, min_size=2, max_size=3).map("".join)
        | st.lists(e, min_size=2, max_size=3).map("|".join).map(lambda inner: f"({inner})")
        | st.tuples(e, _SIGN).map(lambda p: f"(?:{p[0]}){p[1]}")
    ),
    max_leaves=6,
)


def _check_time(expression: str, size: int) -> None:
    """What is accepted takes at most the square of a text's length."""
    try:
        check_expression(expression)
        split = pre_tokenizers.Split(Regex(expression), "isolated")
    except Exception:  # refused by us or by the library
        return
    half = size // 2
    for text in ("a" * size + "!", "ab" * half, "a" * size, "b" * half + "a" * half):
        began = time.thread_time()
        split.pre_tokenize_str(text)
        assert time.thread_time() - began < 20, expression  # the square takes tenths, the cube minutes


@settings(max_examples=40, deadline=None, derandomize=True)
@given(_EXPRESSION)
def test_accepted_expressions_end(expression: str) -> None:
    _check_time(expression, 1_000)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None)
@given(_EXPRESSION)
def test_many_accepted_expressions_end(expression: str) -> None:
    _check_time(expression, 4_000)
