"""Fill-in-the-middle prompts with a gap between `prompt` and `suffix`, in the format that code models were trained
on."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.text.tokenizer import Tokenizer

_FORMS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("fim.toml").read_text(encoding="utf-8"))["forms"]
_MARK = "☺"  # encoded before a suffix, so that the suffix is not at the start of a text


@dataclass(frozen=True)
class FillInMiddle:
    """The fill-in-the-middle format of a model.

    begin: token ids at the start of every text, such as beginning-of-sequence. middle: None if the prefix comes after
    the suffix. ends: token ids that end the text of the gap.
    """

    tokenizer: Tokenizer
    begin: list[int]
    prefix: int
    suffix: int
    middle: int | None
    ends: list[int]
    sentencepiece: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """Return the tokenizer's format, or None if it has no such tokens."""
        for form in _FORMS:
            names = [form[name] for name in ("prefix", "suffix", "middle") if name in form]
            ids = [tokenizer.token_to_id(name) for name in names]
            if None in ids:
                continue
            prefix, suffix, middle = [*ids, None][:3]
            assert prefix is not None
            assert suffix is not None
            ends = [tokenizer.token_to_id(name) for name in form["ends"].split()]
            found = [token_id for token_id in ends if token_id is not None]
            return cls(tokenizer, _begin(tokenizer), prefix, suffix, middle, found, form.get("sentencepiece", False))
        return None

    def prompt(self, prefix: str | list[int], suffix: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt. add_special_tokens: add the tokens that begin every text."""
        before = self.tokenizer.encode(prefix, False) if isinstance(prefix, str) else prefix
        behind = self._within(suffix) if self.sentencepiece else self.tokenizer.encode(suffix, False)
        begin = self.begin if add_special_tokens else []
        if self.middle is None:
            return [*begin, self.suffix, *behind, self.prefix, *before]
        return [*begin, self.prefix, *before, self.suffix, *behind, self.middle]

    def _within(self, text: str) -> list[int]:
        """Return the token ids of a text that is not at the start."""
        mark = self.tokenizer.encode(_MARK, False)
        marked = self.tokenizer.encode(_MARK + text, False)
        return marked[len(mark) :] if marked[: len(mark)] == mark else self.tokenizer.encode(text, False)


def _begin(tokenizer: Tokenizer) -> list[int]:
    plain = tokenizer.encode("a", False)
    framed = tokenizer.encode("a", True)
    return framed[: framed.index(plain[0])] if plain and plain[0] in framed else []
