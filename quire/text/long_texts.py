"""Shortens long texts before tokenization. Texts are tokenized in parts, since 60 MB at once would take 12 GB."""

from collections.abc import Callable, Sized

PART = 1 << 17  # characters; the tokenizer uses 350 bytes per token, so 46 MB at most
_CUT = 16  # tokens that a cut within a word may add


def end_with(encode: Callable[[str], Sized], text: str, num_tokens: int, from_left: bool = False) -> str:
    """Return the beginning of a text with at least this number of tokens; the whole text if it has fewer. A short text
    is returned unchanged.

    encode: returns the tokens of a part. from_left: cut at the left, and return the end of the text.
    """
    found = 0
    for length in range(PART, len(text), PART):
        start = len(text) - length if from_left else length - PART
        found += max(0, len(encode(text[start : start + PART])) - _CUT)
        if found >= num_tokens:
            return text[start:] if from_left else text[:length]
    return text
