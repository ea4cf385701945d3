"""The scheduler's part of speculative decoding: assigns drafts to requests, and counts accepted drafts."""

import sys
from collections.abc import Sequence

import msgspec

from quire.kv.manager import KVCacheManager
from quire.messages.engine import SpeculationStats
from quire.messages.step import SchedulerOutput
from quire.scheduler.constraints import ConstrainedRequests
from quire.scheduler.request import Drafts, Request, Status
from quire.speculation.lengths import Acceptance, DraftLengths
from quire.speculation.proposer import Proposer


class Speculation:
    """Requests drafts from a proposer or a drafter, adds them to steps, and counts accepted ones."""

    is_active = True

    def __init__(
        self, proposer: Proposer | None, lengths: DraftLengths, drafts_stay: bool = False, longest: int = sys.maxsize
    ) -> None:
        """proposer: None if a drafter on the device makes the drafts. Its drafts arrive with the results of a step.
        With drafts_stay, they stay on the device and only their number is known here; this is enough to schedule the
        next step before the results arrive. A grammar cannot check such drafts, so requests with a constraint get none.
        longest: the maximum number of tokens of a text including its drafts."""
        self.proposer = proposer
        self.lengths = lengths
        self.drafts_stay = drafts_stay
        self.longest = longest
        self.stats = SpeculationStats(accepted_at=[0] * lengths.most)  # up to now
        self._acceptance: dict[str, Acceptance] = {}  # by request id
        self._shared: int | None = None  # how many of the drafter's drafts each request of this step gets

    def begin(self, request: Request) -> None:
        """Called when a request is assigned a row. It may have been preempted before its drafts were sent."""
        request.drafts = Drafts()

    def propose(self, running: Sequence[Request]) -> None:
        """Begin a step: if there is a proposer, set the drafts of the requests that compute one token."""
        self._shared = None
        if self.proposer is None:
            return
        texts = []
        most = []
        for request in running:
            request.drafts.on_host = []
            if request.num_computed_tokens + 1 != len(request.token_ids) or request.num_in_flight_samples:
                continue
            if count := self._length(request, len(request.token_ids), len(running)):
                texts.append(request)
                most.append(count)
        if texts:
            for request, drafts in zip(texts, self.proposer.propose(texts, most), strict=True):
                self._set(request, drafts)

    def receive(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> None:
        """Store the drafter's drafts after the sampled tokens of these requests; empty without a drafter."""
        if not drafts:
            return
        for request, made in zip(requests, drafts, strict=True):
            forced = request.token_ids[request.num_computed_tokens + 1 :]  # by a constraint, after the sampled tokens
            if made and request.status is Status.RUNNING and made[: len(forced)] == forced:
                self._set(request, made[len(forced) :])

    def _set(self, request: Request, drafts: list[int]) -> None:
        if drafts and request.constrained is not None:
            drafts = ConstrainedRequests.check_drafts(request.constrained, drafts)
        request.drafts.on_host = drafts

    def _length(self, request: Request, num_tokens: int, num_requests: int) -> int:
        """Return how many drafts are worthwhile after `num_tokens` tokens of a request, in a step of `num_requests`
        requests."""
        acceptance = self._acceptance.setdefault(request.request_id, Acceptance())
        count = min(self.lengths(num_requests, acceptance), max(0, self.longest - num_tokens))
        if not count:
            acceptance.recover()
        return count

    def _shared_length(self, num_requests: int) -> int:
        """Return how many of the drafter's drafts are worthwhile in a step of `num_requests` requests. All requests get
        the same number, since steps are recorded or captured only if each request has equally many tokens."""
        acceptances = self._acceptance.values()
        mean = Acceptance()
        mean.value = sum(acceptance.value for acceptance in acceptances) / len(acceptances)
        count = self.lengths(num_requests, mean)
        for acceptance in acceptances if not count else ():
            acceptance.recover()
        return count

    def extend(
        self, request: Request, end: int, room: int, num_requests: int, step: SchedulerOutput, kv: KVCacheManager
    ) -> int:
        """Add drafts to a step that computes all known tokens of a request, up to `end`, and request those of the next
        step from the drafter. The step's next row must be that of the request. room: for tokens of the request after
        `end`. num_requests: approximate number in the step. Returns the number of drafts in this step."""
        count = self._add_drafts(request, min(room, request.compression.at - 1 - end), step, kv)
        self._ask(request, end + count, num_requests, step, kv)
        return count

    @staticmethod
    def _add_drafts(request: Request, room: int, step: SchedulerOutput, kv: KVCacheManager) -> int:
        """Add drafts: at most `room`, and no more than free blocks and max_tokens allow. Returns their number."""
        known = len(request.token_ids) + request.num_in_flight_samples
        edits = step.draft_tokens
        drafts = request.drafts.on_host
        count = min(len(drafts) or request.drafts.num_on_device, room, request.max_total_tokens - known - 1)
        request.drafts.on_host = []
        request.drafts.num_on_device = 0
        if count <= 0 or not kv.allocate(request, known + count, step.block_table_edits):
            return 0
        step.num_draft_tokens += [0] * (len(step.rows) - len(step.num_draft_tokens))
        step.num_draft_tokens.append(count)
        if drafts:
            edits.rows.extend([request.row] * count)
            edits.positions.extend(range(known, known + count))
            edits.token_ids.extend(drafts[:count])
        return count

    def _ask(self, request: Request, end: int, num_requests: int, step: SchedulerOutput, kv: KVCacheManager) -> None:
        """If there is a drafter, request drafts after the request's tokens up to `end`."""
        if self.proposer is not None or (self.drafts_stay and request.constrained is not None):
            return
        self._acceptance.setdefault(request.request_id, Acceptance())
        if self._shared is None:
            self._shared = self._shared_length(num_requests)
        count = min(self._shared, self.longest - end - 1, request.max_total_tokens - end - 1)
        if count > 0 and kv.allocate(request, end + count, step.block_table_edits):
            request.drafts.num_on_device = count if self.drafts_stay else 0
            step.num_next_drafts += [0] * (len(step.rows) - len(step.num_next_drafts))
            step.num_next_drafts.append(count)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Record that the model has accepted the first `num_accepted` drafts of a request."""
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += num_drafts
        stats.accepted_tokens += num_accepted
        for place in range(num_accepted):
            stats.accepted_at[place] += 1
        if request.request_id in self._acceptance:  # the request may have ended in the meantime
            self._acceptance[request.request_id].verified(num_drafts, num_accepted)

    def counts(self) -> SpeculationStats:
        return msgspec.structs.replace(self.stats, accepted_at=list(self.stats.accepted_at))

    def finish(self, request: Request) -> None:
        if self._acceptance.pop(request.request_id, None) is not None and self.proposer is not None:
            self.proposer.finish(request)


class NoSpeculation:
    """Replaces Speculation in an engine without drafts. is_active: False, so that the scheduler need not call it for
    each request of a step."""

    is_active = False

    def begin(self, request: Request) -> None: ...

    def propose(self, running: Sequence[Request]) -> None: ...

    def receive(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> None: ...

    def extend(
        self, request: Request, end: int, room: int, num_requests: int, step: SchedulerOutput, kv: KVCacheManager
    ) -> int:
        return 0

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None: ...

    def counts(self) -> SpeculationStats | None:
        return None

    def finish(self, request: Request) -> None: ...
