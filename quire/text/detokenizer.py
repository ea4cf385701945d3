"""Incremental detokenization: returns text in whole characters while tokens are generated, and cuts it at stop
strings."""

import codecs
from collections.abc import Sequence

from quire.text.token_bytes import REPLACEMENT
from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one request. Appending a token has a constant cost.

                          ┌ shown ──────────────┬ held back ────────┐
        text              │ already in a delta  │ may begin a stop  │ + partial: bytes of an unfinished character
                          └─────────────────────┴───────────────────┘

    The text equals the part of `tokenizer.decode(prompt + output)` after the prompt, with one exception: the decoder
    of SentencePiece's byte tokens destroys valid characters next to invalid ones. A stream cannot withdraw characters,
    so here only the invalid sequence becomes U+FFFD. The result does not depend on how the output is split into calls
    of `append`.

    stop: non-empty strings. The one that ends first in the text takes effect; if several end together, the longest.
    include_stop_str_in_output: keep the stop string, or the token that ended the request, in the text
    min_tokens: a stop string only takes effect if it ends after the text of this many tokens
    spaces_between_special_tokens: False drops the space that some decoders put between neighbouring added tokens
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset[int]()
        unspaced = not skip_special_tokens and not spaces_between_special_tokens
        self._unspaced = tokenizer.added_tokens if unspaced else {}
        self._after_unspaced = False
        self._stop = tuple(stop)
        self._reach = max(map(len, stop), default=1) - 1  # characters of a stop string that may precede the new text
        self._include_stop = include_stop_str_in_output
        self._held_back = 0 if include_stop_str_in_output else self._reach
        self._exempt = min_tokens  # number of coming tokens that cannot complete a stop string
        self._shown = ""  # the end of the shown text, where a stop string may begin
        self._unshown = ""
        # A character has at most four tokens, so the prompt's last four show whether it ends within a character.
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped and self._token_bytes[token_id]:
                tail.insert(0, token_id)
                if len(tail) == 4:
                    break
        context = b"".join(self._token_bytes[token_id] for token_id in tail)
        self._partial = context[codecs.utf_8_decode(context, "replace", False)[1] :]
        self._partial_of_prompt = bool(self._partial)
        self._at_start = not tail

    @property
    def partial(self) -> bytes:
        """Return the bytes of an incomplete character."""
        return self._partial

    def append(self, token_ids: Sequence[int], finished_by_token: bool = False) -> str | None:
        """Add tokens. If they complete a stop string, the text ends there, and the stop string is returned.

        finished_by_token: the last token ended the request (EOS or a stop token), so it is not part of the text.
        """
        if finished_by_token and not self._include_stop:
            token_ids = token_ids[:-1]
        if self._exempt:
            exempt = token_ids[: self._exempt]
            token_ids = token_ids[self._exempt :]
            self._exempt -= len(exempt)
            self._unshown += self._read(exempt)
        text = self._read(token_ids)
        if self._stop and text:
            return self._add_until_stop(text)
        self._unshown += text
        return None

    def next_delta(self, finished: bool) -> str:
        """Return the new text that can be shown now. Once the request has finished, this is all remaining text."""
        if finished and self._partial:
            self._unshown += self._decode(self._partial, True)
        if self._held_back and not finished:
            delta = self._unshown[: -self._held_back]
            self._unshown = self._unshown[len(delta) :]
        else:
            delta = self._unshown
            self._unshown = ""
        if self._reach:
            self._shown = (self._shown + delta)[-self._reach :]
        return delta

    def flush(self) -> str:
        """End the text; an unfinished character becomes U+FFFD. Returns the text that was held back."""
        return self.next_delta(finished=True)

    def _read(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens add."""
        data = self._partial
        for token_id in token_ids:
            if token_id not in self._skipped:
                data += self._bytes_of(token_id) if self._at_start or self._unspaced else self._token_bytes[token_id]
        return self._decode(data, False)

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token whose spacing depends on the previous token."""
        added = self._unspaced.get(token_id)
        if added is not None and self._after_unspaced:
            return added.encode()
        self._after_unspaced = added is not None
        piece = self._token_bytes.at_start(token_id) if self._at_start else self._token_bytes[token_id]
        self._at_start = self._at_start and not self._token_bytes[token_id]
        return piece

    def _decode(self, data: bytes, final: bool) -> str:
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        if used and self._partial_of_prompt:
            # If the output completes the prompt's last character, the character is output. If the output makes it
            # invalid, its U+FFFD belongs to the prompt.
            text = text.removeprefix(REPLACEMENT)
            self._partial_of_prompt = False
        return text

    def _add_until_stop(self, text: str) -> str | None:
        """Add text up to the first stop string that ends in it, and return that stop string."""
        before = (self._shown + self._unshown)[-self._reach :] if self._reach else ""
        window = before + text
        matches = []
        for stop in self._stop:
            start = window.find(stop, max(len(before) - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        self._unshown += text
        if not matches:
            return None
        end, start, stop = min(matches)
        excess = len(window) - (end if self._include_stop else start)
        self._unshown = self._unshown[: len(self._unshown) - excess]
        self._partial = b""
        return stop
