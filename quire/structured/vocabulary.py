"""The data of a tokenizer for grammar libraries: the bytes of each token, and the tokens of a text."""

import re
from itertools import pairwise

from quire.text.tokenizer import Tokenizer

_SENTINEL = "\x02"  # no vocabulary has a longer token that begins with it


class Vocabulary:
    """The tokens of a model, in the form that llguidance's LLTokenizer accepts.

    tokens: the bytes of each id below the model's vocab_size; b"" for an id without a token, which no mask allows.
    special_token_ids: tokens that never represent text, regardless of their spelling. eos_token_ids: the tokens that
    end a text, the usual one first. Raises ValueError if the model has none.
    """

    is_tokenizer_wrapper = True  # required by llguidance

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        if not eos_token_ids:
            raise ValueError("structured outputs need a model with an end-of-sequence token")
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.vocab_size = vocab_size
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *eos_token_ids})
        self.tokens = [tokenizer.token_bytes[token_id] for token_id in range(vocab_size)]
        self._tokenizer = tokenizer
        names = [tokenizer.added_tokens.get(token_id, "") for token_id in self.special_token_ids]
        self._specials = re.compile("|".join(re.escape(name) for name in names if name) or "(?!)")
        # SentencePiece adds a space before a text, which would be wrong in the middle of a text.
        plain = self._encode_piece('{"a')
        self._prefix = "" if b"".join(map(self.tokens.__getitem__, plain)) == b'{"a' else _SENTINEL
        self._prefix_length = len(self._encode_piece(self._prefix)) if self._prefix else 0

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text in the middle of another. The spelling of a special token is encoded as text."""
        text = text if isinstance(text, str) else text.decode()
        cuts = [0, *(match.start() + 1 for match in self._specials.finditer(text)), len(text)]
        pieces = [self._prefix + text[start:end] for start, end in pairwise(cuts)]
        ids = [token_id for piece in pieces for token_id in self._encode_piece(piece)[self._prefix_length :]]
        return ids if all(token_id < self.vocab_size for token_id in ids) else []

    def _encode_piece(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
