"""The part of the scheduler that speculates: who gets drafts, how many, and what became of them."""

from collections.abc import Sequence

import msgspec

from quire.messages.engine import SpeculationStats
from quire.messages.step import SchedulerOutput
from quire.scheduler.constraints import ConstrainedRequests
from quire.scheduler.request import Request
from quire.speculative.lengths import Acceptance, DraftLengths
from quire.speculative.proposer import Proposer


class Speculation:
    """Asks the proposer for drafts, and counts those that are accepted."""

    def __init__(self, proposer: Proposer, lengths: DraftLengths) -> None:
        self.proposer, self.lengths = proposer, lengths
        self.stats = SpeculationStats(accepted_at=[0] * lengths.most)  # up to now
        self._acceptance: dict[str, Acceptance] = {}  # by request id

    def propose(self, running: Sequence[Request]) -> None:
        """Set the drafts of the requests whose next step computes one token."""
        texts, most = [], []
        for request in running:
            request.drafts = []
            if request.num_computed_tokens + 1 != len(request.token_ids) or request.num_in_flight_samples:
                continue
            acceptance = self._acceptance.setdefault(request.request_id, Acceptance())
            count = self.lengths(len(running), acceptance)
            if count:
                texts.append(request)
                most.append(count)
            else:
                acceptance.recover()
        if texts:
            for request, drafts in zip(texts, self.proposer.propose(texts, most), strict=True):
                request.drafts = drafts
                if drafts and request.constraint is not None:
                    ConstrainedRequests.check_drafts(request)

    @staticmethod
    def send(request: Request, count: int, step: SchedulerOutput) -> None:
        """Send the first drafts of a request with a step, whose next row is to be that of the request."""
        known, edits = len(request.token_ids), step.draft_tokens
        step.num_draft_tokens += [0] * (len(step.rows) - len(step.num_draft_tokens))
        step.num_draft_tokens.append(count)
        edits.rows.extend([request.row] * count)
        edits.positions.extend(range(known, known + count))
        edits.token_ids.extend(request.drafts[:count])

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The model has accepted the first `num_accepted` drafts of a request."""
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += num_drafts
        stats.accepted_tokens += num_accepted
        for place in range(num_accepted):
            stats.accepted_at[place] += 1
        if request.request_id in self._acceptance:  # the request may have ended meanwhile
            self._acceptance[request.request_id].verified(num_drafts, num_accepted)

    def counts(self) -> SpeculationStats:
        return msgspec.structs.replace(self.stats, accepted_at=list(self.stats.accepted_at))

    def finish(self, request: Request) -> None:
        if self._acceptance.pop(request.request_id, None) is not None:
            self.proposer.finish(request)
