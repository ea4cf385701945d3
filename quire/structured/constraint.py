"""The constraint of one request: thinking first, where there is any, and then a grammar."""

import time
from collections.abc import Sequence
from copy import copy

from quire.messages.errors import error_text
from quire.messages.structured_outputs import ThinkingLimits
from quire.structured.grammar import Matcher

_USUAL = 0.005  # seconds of processor time for a token; masks take 0.05 ms to 1 ms
_CREDIT = 0.5  # seconds beyond that, which a request's tokens may take in all


class Constraint:
    """Which tokens a request may draw next, as a function of its output so far.

    The grammar says nothing while the model thinks. When the budget for thinking is used up, the end marker is forced.
    An answer may begin with the start marker of thinking, whatever the grammar says, if that is a single token.
    Forced tokens are a function of the tokens before them, too: the same output results whether the scheduler takes
    them ahead, or each of them is drawn under a mask that allows no other.

    eos_token_ids: the tokens that end a text, the usual one first. It is forced once the text is complete. The grammar
    has no say behind one of them.
    """

    def __init__(
        self, matcher: Matcher | None, thinking: ThinkingLimits | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.matcher = matcher
        self._error: str | None = None
        self._thinking = thinking
        self._eos_token_ids = eos_token_ids
        self._is_thinking = thinking is not None and thinking.is_open
        # The start marker, as long as the output is empty and may begin with it.
        self.opening_token = thinking.start_ids[0] if thinking and matcher and self._may_open(thinking) else None
        self._num_thinking = 0  # tokens since the thinking began
        self._debt = 0.0  # seconds of processor time beyond what is usual
        self._has_ended = False  # end-of-sequence was drawn, and the request goes on nevertheless
        self._tail: list[int] = []  # the last tokens outside the grammar, at most as many as a marker has
        self._forced: list[int] = []
        self._next = 0  # the first of the forced tokens that is not in the output
        self._find_forced()

    def fork(self) -> "Constraint":
        """A copy, to follow a text that may turn out otherwise."""
        other = copy(self)  # its lists are never changed in place
        try:
            other.matcher = None if self.matcher is None else self.matcher.fork()
        except Exception as reason:
            other.fail(error_text(reason))
        return other

    def advance(self, token_id: int) -> None:
        """Add a token to the output: one that was drawn, forced, or is replayed."""
        started = time.thread_time()
        try:
            self._advance(token_id)
            self.charge(time.thread_time() - started)
        except KeyboardInterrupt:
            raise
        except BaseException as reason:  # a library's panic is no Exception
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
        """The grammar took so much processor time for a token. A request whose grammar is slow again and again fails,
        since all requests of a step wait for it."""
        self._debt = max(0.0, self._debt + seconds - _USUAL)
        if self._debt > _CREDIT and self.error is None:
            self.fail(f"the grammar is too complex: its tokens need {_USUAL * 1e3:.0f} ms of processor time each")

    def fail(self, reason: str) -> None:
        """End the request with this error, because the back end cannot go on."""
        self._error = reason
        self._forced = []
        self._next = 0

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, in this order. The next token is the first of them, if there are any."""
        return self._forced[self._next :]

    @property
    def error(self) -> str | None:
        """Why the request cannot go on. The computation of a mask may fail, too."""
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
        """Count a token outside the grammar, and look for the markers around thinking."""
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
        """Set the tokens that follow in any case."""
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
