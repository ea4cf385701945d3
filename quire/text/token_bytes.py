"""The bytes that each token adds to a text. Streams, logprobs and grammars use them."""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer as Backend

from quire.text.partial_backend import PartialBackend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FIRST_TRIED = 64  # tokens that are searched for the anchor first
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte in GPT-2's alphabet. Printable bytes map to themselves; the others follow U+00FF."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


BYTE_OF_CHARACTER = _byte_level_alphabet()


def is_fault(error: BaseException) -> bool:
    """Whether it is an error of the tokenizers library. The library raises plain Exceptions, and panics of its Rust
    code are not Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class TokenBytes(dict[int, bytes]):
    """`token_bytes[token_id]`: the bytes that the token adds after other text; b"" for an id without a token.

    The text of a token depends on its neighbours in only two ways: some decoders drop the space before the first token
    of a text, and the bytes of a character may be spread over several tokens. So a text is `at_start(first)` plus the
    bytes of all later tokens, decoded as UTF-8 at the end. (This does not hold for CTC decoders and the </w> suffix of
    the first GPT.) Entries are computed on first use: the tokenizer decodes the token after an alphanumeric token (the
    anchor). If the result is not whole characters, the bytes follow from the token's spelling.
    """

    def __init__(self, backend: Backend | PartialBackend) -> None:
        self._backend = backend
        self._anchor, self._anchor_text = self._find_anchor()

    def _find_anchor(self) -> tuple[list[int], str]:
        count = self._backend.get_vocab_size()
        first = 0
        step = _FIRST_TRIED
        while first < count:
            for token_id, text in enumerate(self._decode_each(range(first, min(first + step, count))), first):
                if text.isascii() and text.isalnum():
                    return [token_id], text
            first = first + step
            step = 2 * step
        return [], ""

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            piece = b""
        else:
            text = self._decode([*self._anchor, token_id])
            piece = self._encode(text.removeprefix(self._anchor_text), token)
        self[token_id] = piece
        return piece

    def at_start(self, token_id: int) -> bytes:
        """Return the bytes of the token as the first token of a text."""
        text = self._decode([token_id])
        return self[token_id] if REPLACEMENT in text else text.encode()

    def _decode_each(self, ids: Iterable[int]) -> list[str]:
        """Return the texts of tokens."""
        each = [[token_id] for token_id in ids]
        try:
            return self._backend.decode_batch(each, skip_special_tokens=False)
        except BaseException as error:
            if not is_fault(error):
                raise
            return [self._decode(ids) for ids in each]

    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens; as the vocabulary spells them, if the decoder fails on them."""
        try:
            return self._backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            if not is_fault(error):
                raise
            return "".join(self._backend.id_to_token(token_id) or "" for token_id in ids)

    @staticmethod
    def _encode(text: str, token: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        if match := _BYTE_TOKEN.fullmatch(token):  # byte fallback, as in SentencePiece
            return bytes.fromhex(match[1])
        if all(character in BYTE_OF_CHARACTER for character in token):  # byte-level BPE
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return text.encode()  # a token that really is U+FFFD
