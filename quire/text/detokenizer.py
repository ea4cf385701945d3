"""From token ids back to text while they are generated: whole characters only, and never beyond a stop string."""

import codecs
import io
from collections.abc import Sequence

from quire.text.token_bytes import REPLACEMENT
from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one request, grown token by token at a constant cost per token.

                          ┌ shown ──────────────┬ held back ────────┐
        text              │ already in a delta  │ may begin a stop  │ + partial: bytes of an unfinished character
                          └─────────────────────┴───────────────────┘

    The text is what follows the prompt in `tokenizer.decode(prompt + output)`, with one exception: the decoder of
    SentencePiece's byte tokens spoils valid characters next to invalid ones, which a stream cannot take back; here each
    invalid sequence alone becomes U+FFFD. How the output is cut into `append` calls changes neither text nor stop.

    stop: non-empty strings. The one that ends first counts; of those that end together, the longest.
    include_stop_str_in_output: keep the stop string, or the token that ended the request, in the text
    min_tokens: a stop string must end after the text of this many tokens
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
        self._longest_stop = max(map(len, stop), default=0)
        self._include_stop = include_stop_str_in_output
        self._held_back = max(self._longest_stop - 1, 0) if not include_stop_str_in_output else 0
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._text = io.StringIO()  # appends in constant time; positions are characters; kept at its end
        self._length = 0
        self._shown = 0
        # A character takes at most four tokens: they tell whether the prompt ends within one, or is empty.
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
        """The bytes of a character that is not yet complete."""
        return self._partial

    @property
    def output_text(self) -> str:
        """All text so far, without a character that is not yet complete; whole after `flush` or `next_delta(True)`."""
        return self._text.getvalue()

    def append(self, token_ids: Sequence[int], finished_by_token: bool = False) -> str | None:
        """Adds tokens; returns the stop string that they complete, if any: the text then ends there.

        finished_by_token: the last of them ended the request (EOS or a stop token), so it is not text.
        """
        if finished_by_token and not self._include_stop:
            token_ids = token_ids[:-1]
        exempt = max(self._min_tokens - self._num_tokens, 0)
        self._num_tokens += len(token_ids)
        if exempt:
            self._write(token_ids[:exempt])
            token_ids = token_ids[exempt:]
        before = self._length
        self._write(token_ids)
        return self._cut_at_stop(before) if self._stop and self._length > before else None

    def next_delta(self, finished: bool) -> str:
        """The text that may be shown now and has not been; all of the rest when the request has finished."""
        if finished:
            self._decode(self._partial, final=True)
        end = self._length if finished else self._length - self._held_back
        if end <= self._shown:
            return ""
        self._text.seek(self._shown)
        delta = self._text.read(end - self._shown)
        self._text.seek(self._length)
        self._shown = end
        return delta

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD. Returns what had been held back."""
        return self.next_delta(finished=True)

    def _write(self, token_ids: Sequence[int]) -> None:
        data = self._partial
        for token_id in token_ids:
            if token_id not in self._skipped:
                data += self._bytes_of(token_id) if self._at_start or self._unspaced else self._token_bytes[token_id]
        self._decode(data, final=False)

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token whose spacing depends on what is before it."""
        added = self._unspaced.get(token_id)
        if added is not None and self._after_unspaced:
            return added.encode()
        self._after_unspaced = added is not None
        piece = self._token_bytes.at_start(token_id) if self._at_start else self._token_bytes[token_id]
        self._at_start = self._at_start and not self._token_bytes[token_id]
        return piece

    def _decode(self, data: bytes, final: bool) -> None:
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._partial = data[used:]
        if used and self._partial_of_prompt:
            # Completed, the character that the prompt began is output; spoilt, its U+FFFD is the prompt's.
            text = text.removeprefix(REPLACEMENT)
            self._partial_of_prompt = False
        self._text.write(text)
        self._length += len(text)

    def _cut_at_stop(self, before: int) -> str | None:
        """Cuts at the first stop string that ends behind the first `before` characters, and returns it."""
        begin = max(before - self._longest_stop + 1, 0)
        self._text.seek(begin)
        window = self._text.read()
        hits = []
        for stop in self._stop:
            at = window.find(stop, max(before - len(stop) + 1 - begin, 0))
            if at >= 0:
                hits.append((at + len(stop), at, stop))
        if not hits:
            return None
        end, at, stop = min(hits)
        self._length = begin + (end if self._include_stop else at)
        self._text.seek(self._length)
        self._text.truncate()
        self._partial = b""
        return stop
