"""Checks a tokenizer.json before it is loaded: its steps must terminate, and must not produce texts of unbounded
length.

The tokenizers library runs the steps when it loads a file (on its added tokens), and on every text of a request. Its
regular expressions backtrack. So expressions are only accepted in a form that cannot take exponential time.
Replacements are only accepted if together they lengthen a text by a small factor.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer as Backend

from quire.messages.errors import error_text
from quire.platform.files import MIB, read_bytes
from quire.text.partial_backend import PartialBackend

MOST_BYTES = 512 * MIB  # of a file: those of the largest vocabularies take 40 MiB
_MOST_STEPS = 200
MOST_GROWTH = 64  # factor by which all steps together may lengthen a text
_LONGEST = 10_000  # characters of a pattern or of its replacement
_LONGEST_WORD = 1_000  # characters of a word for WordPiece, which takes quadratic time
LONGEST_PIECE = 2_000  # characters of a piece of a Unigram model
_MANY = 64  # repetitions that are treated as unlimited
_DEEPEST = 50  # groups within groups
_LONG_WORD = 200  # characters; the limits of usual WordPiece models are no higher
# Alternatives that fail on a run of spaces, which the next alternative then consumes.
_ALL_SPACES = r"\s+(?!\S)"
_OF_SPACES = {_ALL_SPACES, r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+[\r\n]+"}


MOST_IDS = 1 << 24  # the largest id plus one: memory is allocated for all ids below it, with or without tokens


def vocabulary_size(backend: Backend | PartialBackend) -> int:
    """Return the largest id plus one. Raises ValueError for a vocabulary whose unused ids would take too much
    memory."""
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if size > MOST_IDS:
        raise ValueError(f"model.vocab has the id {size - 1}; at most {MOST_IDS - 1} is allowed")
    return size


class _Model(msgspec.Struct):
    type: str | None = None
    max_input_chars_per_word: int | None = None


class _File(msgspec.Struct):
    """The parts that are checked; skipping the vocabulary is fast."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None
    model: _Model = msgspec.field(default_factory=_Model)


class _UnigramModel(msgspec.Struct):
    vocab: list[tuple[str, float]] = []


class _UnigramFile(msgspec.Struct):
    model: _UnigramModel


def check_tokenizer(path: Path) -> bytes:
    """Return the content of a tokenizer.json. Raises ValueError that names the field that might never terminate."""
    data = read_bytes(path, MOST_BYTES)
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON of a tokenizer: {error_text(error)}") from error
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        _check_steps(name, getattr(file, name))
    word = file.model.max_input_chars_per_word
    if word is not None and word > _LONGEST_WORD:
        raise ValueError(f"model.max_input_chars_per_word is {word:,}; at most {_LONGEST_WORD:,} are allowed")
    if file.model.type == "Unigram":
        longest = max((len(piece) for piece, _ in msgspec.json.decode(data, type=_UnigramFile).model.vocab), default=0)
        if longest > LONGEST_PIECE:
            raise ValueError(
                f"model.vocab has a piece of {longest:,} characters; at most {LONGEST_PIECE:,} are allowed"
            )
    return data


def _check_steps(name: str, part: Any) -> None:
    growth = 1.0
    for count, (path, step) in enumerate(_steps(name, part)):
        if count >= _MOST_STEPS:
            raise ValueError(f"{name} has more than {_MOST_STEPS} steps")
        _check_lengths(path, step)
        expression = _expression(step)
        if expression is not None:
            try:
                check_expression(expression)
            except ValueError as error:
                raise ValueError(f"{path}.pattern {expression[:100]!r} {error_text(error)}") from error
            if name == "decoder" and is_quadratic(expression):
                raise ValueError(f"{path}.pattern {expression[:100]!r} could take quadratic time")
        growth *= _growth(step)
        if growth > MOST_GROWTH:
            raise ValueError(f"{path} may make a text more than {MOST_GROWTH} times as long, with the steps before it")


def _check_lengths(path: str, step: dict[str, Any]) -> None:
    """Check the texts of a step, and those of its special tokens."""
    for key, value in step.items():
        if isinstance(value, str) and len(value) > _LONGEST and key != "precompiled_charsmap":
            raise ValueError(f"{path}.{key} has {len(value):,} characters; at most {_LONGEST:,} are allowed")
    special = step.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        if isinstance(token, dict) and isinstance(ids := token.get("ids"), list) and len(ids) > _MOST_STEPS:
            raise ValueError(f"{path}.special_tokens has a token of {len(ids):,} ids")


def _expression(step: dict[str, Any]) -> str | None:
    """Return the regular expression of a step."""
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    return expression if isinstance(expression, str) else None


def _steps(path: str, part: Any, depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all steps of a part of the file in order, each with its place."""
    if not isinstance(part, dict):
        return
    if depth > _DEEPEST:
        raise ValueError(f"{path[:100]} lies in more than {_DEEPEST} sequences")
    yield path, part
    for name in ("normalizers", "pretokenizers", "decoders", "processors"):
        inner = part.get(name)
        for index, step in enumerate(inner if isinstance(inner, list) else ()):
            yield from _steps(f"{path}.{name}[{index}]", step, depth + 1)


def _growth(step: dict[str, Any]) -> float:
    """Return the factor by which a step may lengthen a text."""
    kind = step.get("type")
    content = step.get("content")
    if kind == "Precompiled":
        return _charsmap_growth(step.get("precompiled_charsmap"))
    if kind != "Replace" or not isinstance(content, str):
        return 1.0
    pattern = step.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return max(1.0, len(content) / len(literal))
    return 1.0 + len(content)  # an empty match adds the content to each character


def _charsmap_growth(text: Any) -> float:
    try:
        return charsmap_growth(base64.b64decode(text or ""))
    except (binascii.Error, ValueError, TypeError):
        return 1.0  # the library rejects it


def charsmap_growth(data: bytes) -> float:
    """Return the factor by which SentencePiece's table may lengthen a text. The table contains a trie, and the
    replacement texts, each followed by a zero byte."""
    size = int.from_bytes(data[:4], "little")
    longest = max(map(len, data[4 + size :].split(b"\0")), default=1)
    return 1.0 if longest <= MOST_GROWTH else float(longest)


# ---- regular expressions

_CLASS_OF_CHARACTERS = re.compile(r"\[:\^?\w+:\]")
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]{0,60}\}|x\{[0-9a-fA-F ]{1,60}\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_REPETITION = re.compile(r"[*+?]|\{(\d{0,6})(?:(,)(\d{0,6}))?\}")
_GROUP = re.compile(r"\(\?(?:[:>=!|]|<[=!]|[imxsadlu-]{0,8}[:)]|<\w{1,60}>|P<\w{1,60}>)")


class _Part(NamedTuple):
    """The properties of a part of an expression that determine its cost.

    is_empty: whether it can match the empty string. varies: whether it can match a text in several ways, by a
    repetition or alternatives. opens: its unlimited repetitions. slow: how many of these are followed by a part that
    may fail, so that all lengths are tried. is_nested: whether it repeats a part that varies.
    """

    is_empty: bool
    varies: bool = False
    opens: int = 0
    slow: int = 0
    is_nested: bool = False


def has_quadratic_step(backend: Backend | PartialBackend) -> bool:
    """Whether a loaded tokenizer may take quadratic time for a text, judging by its expressions."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        state = msgspec.json.decode(part.__getstate__()) if part is not None else None
        for _, step in _steps("", state):
            expression = _expression(step)
            if expression is not None and is_quadratic(expression):
                return True
    return getattr(backend.model, "max_input_chars_per_word", 0) > _LONG_WORD


def is_quadratic(text: str) -> bool:
    """Whether an expression may take quadratic time. The expressions of usual models take linear time although their
    form allows quadratic time: if one alternative fails on a text, another one consumes that text."""
    if text in _published():
        return False
    reader = _Reader(text)
    alternatives = dict[str, _Part]()
    while True:
        start = reader.position
        part = reader.sequence(0)
        alternatives[text[start : reader.position]] = part
        if not text.startswith("|", reader.position):
            break
        reader.position += 1
    slow = {alternative for alternative, part in alternatives.items() if part.slow}
    return bool(slow) and not (slow <= _OF_SPACES and _ALL_SPACES in alternatives)


@cache
def _published() -> frozenset[str]:
    from quire.text.bpe import SPLITS

    return frozenset(expression for expressions in SPLITS.values() for expression in expressions)


def check_expression(text: str) -> None:
    """Raises ValueError for an expression that may take exponential or at least cubic time. That requires a repetition
    within a repetition, or several in a row, followed by a part that may fail.
    """
    reader = _Reader(text)
    whole = reader.alternatives(0)
    if reader.position < len(text):
        raise ValueError("has a ')' too many")
    if whole.slow > 1:
        raise ValueError("repeats several parts before one that may fail: it could take very long for some texts")


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def alternatives(self, depth: int) -> _Part:
        if depth > _DEEPEST:
            raise ValueError(f"has more than {_DEEPEST} groups within groups")
        parts = [self.sequence(depth)]
        while self.text.startswith("|", self.position):
            self.position += 1
            parts.append(self.sequence(depth))
        return _Part(
            any(part.is_empty for part in parts),
            len(parts) > 1 or parts[0].varies,
            max(part.opens for part in parts),
            max(part.slow for part in parts),
            any(part.is_nested for part in parts),
        )

    def sequence(self, depth: int) -> _Part:
        parts = list[_Part]()
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            parts.append(self._repeated(depth))
        # From the end: the following part decides whether all lengths of a repetition are tried.
        may_fail = False
        slow = 0
        for part in reversed(parts):
            if may_fail and part.is_nested:
                raise ValueError("has a repetition within a repetition: it could take forever for some texts")
            slow += part.opens if may_fail else part.slow
            may_fail |= not part.is_empty
        return _Part(
            all(part.is_empty for part in parts),
            any(part.varies for part in parts),
            sum(part.opens for part in parts),
            slow,
            any(part.is_nested for part in parts),
        )

    def _repeated(self, depth: int) -> _Part:
        """Return an atom with its repetitions."""
        part = self._atom(depth)
        while match := _REPETITION.match(self.text, self.position):
            sign = match[0]
            self.position = match.end()
            if sign in "*+?":
                least = int(sign == "+")
                most = 1 if sign == "?" else _MANY
                if self.text[self.position : self.position + 1] in ("?", "+"):
                    self.position += 1  # lazy or possessive
            else:
                least = int(match[1] or 0)
                most = int(match[3] or _MANY) if match[2] else least
            is_open = most >= _MANY
            if is_open and part.is_empty:
                raise ValueError("repeats a part that may be empty: it could take forever for some texts")
            part = _Part(
                part.is_empty or least == 0,
                part.varies or least != most,
                part.opens + is_open,
                part.slow,
                part.is_nested or (most > 1 and part.varies),
            )
        return part

    def _atom(self, depth: int) -> _Part:
        text = self.text
        at = self.position
        if text[at] == "(":
            return self._group(depth)
        if text[at] == "[":
            self._characters(0)
            return _Part(False)
        if text[at] == "\\":
            match = _ESCAPE.match(text, at)
            if match is None:
                raise ValueError("ends with a backslash")
            if match[0][1] in "123456789kg":
                raise ValueError("refers to a group, which could take forever for some texts")
            self.position = match.end()
        else:
            self.position += 1
        return _Part(False)  # also for an anchor such as $: it consumes no text, but may fail

    def _group(self, depth: int) -> _Part:
        text = self.text
        at = self.position
        looks = False
        if text.startswith("(?#", at):
            end = text.find(")", at)
            self.position = len(text) if end < 0 else end + 1
            return _Part(True)
        if text.startswith("(?", at):
            match = _GROUP.match(text, at)
            if match is None:
                raise ValueError(f"has a group of an unknown kind at character {at}")
            self.position = match.end()
            if match[0].endswith(")"):  # (?i)
                return _Part(True)
            looks = match[0].endswith(("=", "!"))
        else:
            self.position += 1
        inner = self.alternatives(depth + 1)
        if not text.startswith(")", self.position):
            raise ValueError("lacks a ')'")
        self.position += 1
        if looks:  # it may fail, and consumes no text
            return _Part(False, slow=inner.slow)
        return inner

    def _characters(self, depth: int) -> None:
        """Skip a set [...], which may contain other sets."""
        if depth > _DEEPEST:
            raise ValueError(f"has more than {_DEEPEST} sets within sets")
        text = self.text
        self.position += 2 if text.startswith("[^", self.position) else 1
        if text.startswith("]", self.position):
            self.position += 1
        while self.position < len(text):
            if match := _CLASS_OF_CHARACTERS.match(text, self.position):
                self.position = match.end()
            elif text[self.position] == "[":
                self._characters(depth + 1)
            elif text[self.position] == "\\":
                self.position += 2
            elif text[self.position] == "]":
                self.position += 1
                return
            else:
                self.position += 1
        raise ValueError("lacks a ']'")
