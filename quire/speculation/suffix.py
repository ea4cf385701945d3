"""Drafts from earlier text: if the end of a text occurs earlier, the text may continue as it did there.

The longest match of the text's last tokens is searched in the text itself and, optionally, in recent outputs. The most
frequent continuation is proposed, as long as it is likely enough.

Sources: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding); SuffixDecoding, arXiv:2411.04975. The latter
keeps suffix trees. Here, a single comparison of all positions replaces them: no index has to be updated for each token,
and a text of 10,000 tokens takes some 20 microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.speculation.proposer import Text

Tokens = npt.NDArray[np.int32]
_MOST_MATCHES = 64  # the latest matches, if there are more


@dataclass(frozen=True)
class SuffixOptions:
    """min_match, max_match: the minimum and maximum number of matching last tokens. factor: the maximum number of
    drafts per matching token. min_probability: less likely drafts are not proposed. recent_tokens: how many tokens of
    recent outputs are also searched."""

    min_match: int = 1
    max_match: int = 24
    factor: float = 1.0
    min_probability: float = 0.1
    recent_tokens: int = 0


class _Memory:
    """A growing sequence of tokens."""

    def __init__(self, size: int = 1024) -> None:
        self.array: Tokens = np.empty(size, np.int32)
        self.length = 0

    @property
    def tokens(self) -> Tokens:
        return self.array[: self.length]

    def append(self, tokens: Sequence[int] | Tokens) -> None:
        end = self.length + len(tokens)
        if end > len(self.array):
            self.array = np.concatenate((self.tokens, np.empty(end, np.int32)))
        self.array[self.length : end] = tokens
        self.length = end


class SuffixProposer:
    """Proposes the tokens that followed the longest match of a text's end."""

    def __init__(self, options: SuffixOptions) -> None:
        self.options = options
        self._texts: dict[str, _Memory] = {}  # by request id
        self._recent: dict[str | None, _Memory] = {}  # outputs by cache salt, with -1 between them

    def propose(self, texts: Sequence[Text], most: Sequence[int]) -> list[list[int]]:
        return [self._propose(text, count) if count else [] for text, count in zip(texts, most, strict=True)]

    def finish(self, text: Text) -> None:
        self._texts.pop(text.request_id, None)
        limit = self.options.recent_tokens
        if limit and len(text.token_ids) > text.num_prompt_tokens:
            recent = self._recent.setdefault(text.cache_salt, _Memory())
            recent.append([*text.token_ids[text.num_prompt_tokens :], -1])
            if recent.length > 2 * limit:
                recent.array = recent.tokens[-limit:].copy()
                recent.length = limit
            while sum(memory.length for memory in self._recent.values()) > 4 * limit:
                del self._recent[next(iter(self._recent))]  # the oldest salts are removed first

    def _propose(self, text: Text, most: int) -> list[int]:
        memory = self._texts.get(text.request_id)
        if memory is None:
            memory = self._texts[text.request_id] = _Memory(2 * len(text.token_ids) + 256)
        memory.append(text.token_ids[memory.length :])
        tokens = memory.tokens
        ends, matched = self._matches(tokens[:-1], tokens)
        found = tokens
        if matched < self.options.max_match and text.cache_salt in self._recent:
            recent = self._recent[text.cache_salt].tokens
            elsewhere, longer = self._matches(recent[:-1], tokens)
            if longer > matched:
                ends = elsewhere
                matched = longer
                found = recent
        if matched < self.options.min_match:
            return []
        return self._continuation(found, ends, int(min(most, matched * self.options.factor)))

    def _matches(self, where: Tokens, text: Tokens) -> tuple[npt.NDArray[np.int64], int]:
        """Return the positions in `where` with the longest match of the last tokens of `text`, and the length of the
        match."""
        ends = np.flatnonzero(where == text[-1])[-_MOST_MATCHES:]
        if not len(ends):
            return ends, 0
        reach = np.arange(min(self.options.max_match, len(text)))
        positions = ends[:, None] - reach
        equal = (where[np.maximum(positions, 0)] == text[len(text) - 1 - reach]) & (positions >= 0)
        lengths = equal.cumprod(1).sum(1)
        longest = int(lengths.max())
        return ends[lengths == longest], longest

    def _continuation(self, tokens: Tokens, ends: npt.NDArray[np.int64], most: int) -> list[int]:
        """Return the likeliest tokens after the positions `ends`."""
        drafts: list[int] = []
        probability = 1.0
        while len(drafts) < most and len(ends) > 1:
            ends = ends + 1
            ends = ends[ends < len(tokens)]
            following, counts = np.unique(tokens[ends], return_counts=True)
            if not len(following):
                return drafts
            best = int(counts.argmax())
            probability *= counts[best] / len(ends)
            if probability < self.options.min_probability or following[best] < 0:
                return drafts
            drafts.append(int(following[best]))
            ends = ends[tokens[ends] == following[best]]
        if len(drafts) < most and len(ends):
            # A text that ends within a repetition probably continues it, so the following tokens are repeated.
            following = tokens[int(ends[0]) + 1 :]
            drafts += np.resize(following, most - len(drafts)).tolist() if len(following) else []
        return drafts[: drafts.index(-1)] if -1 in drafts else drafts
