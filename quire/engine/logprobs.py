"""From packed logprobs to vLLM's {token id: Logprob}."""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

from quire.messages.outputs import Logprob
from quire.messages.step import Logprobs


class LogprobUnpacker:
    """Unpacks the logprobs of one sequence, place after place.

    decoded_token is what the token would add to the text so far: "" where a character goes on in the next token, and
    the whole character where it ends. So the decoded tokens of a sequence, special ones included, make up its text.
    """

    def __init__(self, token_bytes: Mapping[int, bytes] | None, partial: bytes = b"", likeliest: bool = True) -> None:
        """token_bytes: of each token, or None to leave decoded_token out; partial: of the last character before;
        likeliest: False if the request named the tokens, so that the ranks of all but the one that is there are not
        known."""
        self._token_bytes, self._partial, self._likeliest = token_bytes, partial, likeliest

    def unpack(self, packed: Logprobs) -> list[dict[int, Logprob]]:
        """For each place, the token that is there and then the likeliest, or those that the request named."""
        width = packed.width
        token_ids = memoryview(packed.token_ids).cast("i").tolist()
        logprobs = memoryview(packed.logprobs).cast("f").tolist()
        made: list[dict[int, Logprob]] = []
        others: Sequence[int | None] = range(1, width) if self._likeliest else [None] * (width - 1)
        for place, rank in enumerate(memoryview(packed.ranks).cast("i").tolist()):
            cells = slice(place * width, (place + 1) * width)
            columns = zip(
                token_ids[cells], logprobs[cells], (rank, *others), self._decode(token_ids[cells]), strict=True
            )
            made.append({token_id: Logprob(logprob, rank, token) for token_id, logprob, rank, token in columns})
            if not self._likeliest:  # the token that is there may be one of those that were named
                made[-1][token_ids[cells.start]].rank = rank
        return made

    def skip(self, token_id: int) -> None:
        """A token of which there are no logprobs: the first of a prompt."""
        self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> list[str] | list[None]:
        """Each as the next token; the first of them is."""
        if self._token_bytes is None:
            return [None] * len(token_ids)
        pieces = [self._partial + self._token_bytes[token_id] for token_id in token_ids]
        decoded = [utf_8_decode(piece, "replace", False) for piece in pieces]
        self._partial = pieces[0][decoded[0][1] :]
        return [text for text, _ in decoded]
