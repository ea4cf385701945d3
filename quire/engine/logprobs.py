"""Converts packed logprobs to vLLM's {token id: Logprob}."""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from math import inf

from quire.messages.outputs import Logprob
from quire.messages.step import Logprobs


class LogprobUnpacker:
    """Unpacks the logprobs of one sequence, place after place.

    decoded_token is the text that the token would add to the text so far. A token that ends within a character adds "",
    and the token that completes the character adds all of it. So the decoded tokens of a sequence, including special
    ones, concatenate to its text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes] | None, partial: bytes = b"", likeliest: bool = True) -> None:
        """token_bytes: the bytes of each token, by id; None omits decoded_token. partial: the bytes of an unfinished
        character before the first place. likeliest: False if the request named the tokens; then only the rank of the
        sequence's own token is known."""
        self._token_bytes = token_bytes
        self._partial = partial
        self._likeliest = likeliest

    def unpack(self, packed: Logprobs) -> list[dict[int, Logprob]]:
        """Return for each place the sampled token first, then the likeliest tokens or those that the request named.

        Tokens with probability 0, such as those forbidden by a grammar, are omitted from the likeliest.
        """
        width = packed.width
        token_ids = memoryview(packed.token_ids).cast("i").tolist()
        logprobs = memoryview(packed.logprobs).cast("f").tolist()
        unpacked: list[dict[int, Logprob]] = []
        other_ranks: Sequence[int | None] = range(1, width) if self._likeliest else [None] * (width - 1)
        for place, rank in enumerate(memoryview(packed.ranks).cast("i").tolist()):
            cells = slice(place * width, (place + 1) * width)
            texts = self._decode(token_ids[cells])
            columns = zip(token_ids[cells], logprobs[cells], (rank, *other_ranks), texts, strict=True)
            found = {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in columns}
            if self._likeliest and logprobs[cells.stop - 1] == -inf:  # they are sorted
                own = token_ids[cells.start]
                found = {token_id: e for token_id, e in found.items() if e.logprob > -inf or token_id == own}
            unpacked.append(found)
            if not self._likeliest:  # the sampled token may also be a named one, which has no rank
                unpacked[-1][token_ids[cells.start]].rank = rank
        return unpacked

    def skip(self, token_id: int) -> None:
        """Skip a token without logprobs, such as the first token of a prompt."""
        self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> list[str] | list[None]:
        """Return the text of each candidate for the next token. The first candidate is the sequence's actual token."""
        if self._token_bytes is None:
            return [None] * len(token_ids)
        pieces = [self._partial + self._token_bytes[token_id] for token_id in token_ids]
        decoded = [utf_8_decode(piece, "replace", False) for piece in pieces]
        self._partial = pieces[0][decoded[0][1] :]
        return [text for text, _ in decoded]
