"""Texts of which only some tokens count. They are tokenized in parts, since a text of 60 MB takes 12 GB at once."""

from collections.abc import Callable, Sized

PART = 1 << 17  # characters; the tokenizer takes 350 bytes for each token, so 46 MB at most
_CUT = 16  # tokens that a cut may add, as it goes through a word


def end_with(encode: Callable[[str], Sized], text: str, num_tokens: int, from_left: bool = False) -> str:
    """The beginning of a text with this number of tokens or more; the whole text if it has fewer. A short text is
    returned as it is.

    encode: returns the tokens of a part. from_left: cut there, and return the end of the text.
    """
    found = 0
    for length in range(PART, len(text), PART):
        start = len(text) - length if from_left else length - PART
        found += max(0, len(encode(text[start : start + PART])) - _CUT)
        if found >= num_tokens:
            return text[start:] if from_left else text[:length]
    return text
