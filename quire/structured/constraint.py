"""The constraint of one request: optional thinking first, then a grammar."""

import time
from collections.abc import Sequence
from copy import copy

from quire.messages.errors import error_text
from quire.messages.structured_outputs import ThinkingLimits
from quire.structured.grammar import Matcher

_USUAL = 0.005  # seconds of processor time for a token; masks take 0.05 ms to 1 ms
_CREDIT = 0.5  # seconds beyond that, in total for a request


class Constraint:
    """Determines which tokens a request may generate next, as a function of its output so far. The grammar does not
    apply while the model thinks. When the thinking budget is used up, the end marker is forced. An answer may always
    begin with the start marker of thinking if that is a single token. Forced tokens also depend only on the previous
    tokens: the output is the same whether the scheduler appends them directly, or each is sampled under a mask that
    allows no other.

    eos_token_ids: the tokens that end a text, the usual one first. It is forced once the text is complete. The grammar
    does not apply after one of them.
    """

    def __init__(
        self, matcher: Matcher | None, thinking: ThinkingLimits | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.matcher = matcher
        self._error: str | None = None
        self._thinking = thinking
        self._eos_token_ids = eos_token_ids
        self._is_thinking = thinking is not None and thinking.is_open
        # The start marker, while the output is empty and may begin with it.
        self.opening_token = thinking.start_ids[0] if thinking and matcher and self._may_open(thinking) else None
        self._num_thinking = 0  # tokens since the start of thinking
        self._debt = 0.0  # seconds of processor time beyond what is usual
        self._has_ended = False  # end-of-sequence was sampled, but the request continues
        self._tail: list[int] = []  # the last tokens outside the grammar, at most the length of a marker
        self._forced: list[int] = []
        self._next = 0  # index of the first forced token that is not in the output
        self._find_forced()

    def fork(self) -> "Constraint":
        """Return a copy, to follow a possible continuation of the text."""
        other = copy(self)  # its lists are never changed in place
        try:
            other.matcher = None if self.matcher is None else self.matcher.fork()
        except Exception as reason:
            other.fail(error_text(reason))
        return other

    def advance(self, token_id: int) -> None:
        """Add a token to the output that was sampled, forced or replayed."""
        started = time.thread_time()
        try:
            self._advance(token_id)
            self.charge(time.thread_time() - started)
        except KeyboardInterrupt:
            raise
        except BaseException as reason:  # a library's panic is not an Exception
            self.fail(error_text(reason))

    def _advance(self, token_id: int) -> None:
        if self._has_ended or self.error is not None:
            return
        opening_token = self.opening_token
        self.opening_token = None
        is_expected = self._next < len(self._forced) and self._forced[self._next] == token_id
        if self._is_thinking or self.matcher is None or token_id == opening_token:
            self._think(token_id)
        elif token_id in self._eos_token_ids:
            self._has_ended = True
        elif not self.matcher.accept(token_id):
            self._error = self.matcher.error or f"the grammar does not allow token {token_id}"
        if is_expected and self.error is None:
            self._next += 1
        else:
            self._forced = []
            self._next = 0
        if self._next == len(self._forced):
            self._find_forced()

    def charge(self, seconds: float) -> None:
        """Record the processor time that the grammar took for a token. A request whose grammar is slow repeatedly
        fails, since all requests of a step wait for it."""
        self._debt = max(0.0, self._debt + seconds - _USUAL)
        if self._debt > _CREDIT and self.error is None:
            self.fail(f"the grammar is too complex: its tokens need {_USUAL * 1e3:.0f} ms of processor time each")

    def fail(self, reason: str) -> None:
        """End the request with this error, because the back end cannot continue."""
        self._error = reason
        self._forced = []
        self._next = 0

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, in this order; [] if the next token is not determined."""
        return self._forced[self._next :]

    @property
    def error(self) -> str | None:
        """The reason why the request cannot continue. The computation of a mask may also fail."""
        return self._error if self._error is not None or self.matcher is None else self.matcher.error

    @property
    def is_active(self) -> bool:
        """Whether the next token needs a mask."""
        if self._has_ended or self.error is not None:
            return False
        return bool(self._forced) or (self.matcher is not None and not self._is_thinking)

    @staticmethod
    def _may_open(thinking: ThinkingLimits) -> bool:
        return not thinking.is_open and len(thinking.start_ids) == 1

    def _think(self, token_id: int) -> None:
        """Count a token outside the grammar, and check for the markers around thinking."""
        limits = self._thinking
        if limits is None:
            return
        longest = max(map(len, (limits.end_ids, limits.start_ids, limits.closing_ids, *limits.call_ids)))
        self._tail = [*self._tail, token_id][-longest:]
        self._num_thinking += self._is_thinking
        if limits.start_ids and self._tail[-len(limits.start_ids) :] == limits.start_ids:
            self._is_thinking = True
            self._num_thinking = 0
        elif any(self._tail[-len(ids) :] == ids for ids in (limits.end_ids, *limits.call_ids)):
            self._is_thinking = False

    def _find_forced(self) -> None:
        """Set the tokens that must follow."""
        self._forced = []
        self._next = 0
        limits = self._thinking
        if self._has_ended or self.error is not None:
            return
        if self._is_thinking:
            if limits is not None and limits.budget is not None and self._num_thinking >= limits.budget:
                end = limits.closing_ids or limits.end_ids
                done = max(count for count in range(len(end)) if not count or self._tail[-count:] == end[:count])
                self._forced = end[done:]
        elif self.matcher is not None and self.opening_token is None:
            self._forced = self.matcher.forced()
            if not self._forced and self.matcher.is_finished:
                self._forced = list(self._eos_token_ids[:1])
