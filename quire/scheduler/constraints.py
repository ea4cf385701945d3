"""The scheduler's part of constrained requests: token masks and forced tokens."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire.messages.engine import EngineCoreOutput, FinishReason
from quire.messages.step import SchedulerOutput, TokenMasks
from quire.scheduler.request import ConstrainedOutput, Request, Status
from quire.structured.constraint import Constraint
from quire.structured.gate import GrammarGate

if TYPE_CHECKING:
    import numpy as np

LONG_STRETCH = 2  # a request skips a step to take more forced tokens than this ahead


class ConstrainedRequests:
    """Follows the outputs of the requests that have a constraint.

    Tokens that a constraint forces are taken ahead: they are appended to the known tokens without being sampled, and
    the next step computes them like a prompt chunk. This does not change the output, since the mask of each place
    allows only the forced token. A constraint advances over known tokens only, so it is not affected when a step is
    withdrawn or a request is preempted.
    """

    def __init__(self, gate: GrammarGate, vocab_size: int) -> None:
        """vocab_size: the number of logits."""
        self._gate = gate
        self._bits = _bits(0, -(-vocab_size // 32))  # reused by all steps; grows to the most masks in one step
        self._thread = ThreadPoolExecutor(1, "token masks")  # starts with the first masks
        self._masks: tuple[SchedulerOutput, Future[TokenMasks | None]] | None = None  # of the last step that had masks
        self._unsent: list[tuple[Request, int]] = []  # requests, and the first token that was not sent to the worker
        self.count = 0  # unfinished requests with a constraint

    def begin(self, request: Request) -> Iterator[int]:
        """Assign a request its constraint, and replay its output so far. Yields the tokens forced at the start, which
        the caller appends as they are yielded."""
        if request.constrained is not None:
            return  # it was preempted
        constraint = self._gate.constraint(request.source)
        if constraint is None:
            return
        # Tokens that need logprobs are sampled.
        params = request.source.sampling_params
        takes_ahead = params is not None and params.num_logprobs is None
        request.constrained = ConstrainedOutput(constraint, len(request.token_ids), takes_ahead)
        self.count += 1
        for token in request.source.output_token_ids:
            constraint.advance(token)
        # Tokens that may end the request are sampled, and nothing is appended to a prompt that must be computed whole.
        has_minimum = request.min_total_tokens > len(request.token_ids)
        if has_minimum or request.repetition is not None or not request.source.reads_prefix_cache:
            return
        while takes_ahead and (forced := constraint.forced()) and forced[0] not in request.stop_token_ids:
            if len(request.token_ids) + 1 >= request.max_total_tokens:
                break
            yield forced[0]
            constraint.advance(forced[0])
        if (forced := constraint.forced()) and self._ends_early(request, forced[0]):
            request.waive_minimum()

    def finish(self, request: Request) -> None:
        """Called when a request has ended, in any state."""
        self._gate.leave(request.source)
        if request.constrained is not None:
            self.count -= 1

    def new_tokens(self, request: Request, sampled: list[int]) -> Iterator[int]:
        """Yield the sampled tokens and the forced tokens after them. The caller appends tokens as they are yielded."""
        constrained = request.constrained
        assert constrained is not None
        constraint = constrained.constraint
        for token in sampled:
            if (forced := constraint.forced()) and self._ends_early(request, forced[0]):
                return  # after the drafts of a finished grammar, where no token was allowed
            yield token
            constraint.advance(token)
        if not constrained.takes_ahead or request.holds:  # with a step in flight, the next token is being sampled
            return
        while (forced := constraint.forced()) and not self._ends_early(request, forced[0]):
            yield forced[0]
            constraint.advance(forced[0])

    def complete(self, request: Request, output: EngineCoreOutput, num_sampled: int) -> None:
        """Complete the output of a request after its new tokens have been appended, and decide whether the request
        ends.

        num_sampled: the number of its tokens up to the last one that was sampled.
        """
        assert request.constrained is not None
        constraint = request.constrained.constraint
        num_tokens = len(request.token_ids)
        output.new_token_ids = request.token_ids[request.constrained.num_reported_tokens :]
        output.num_cached_tokens = min(request.num_cached_tokens, request.num_prompt_tokens)
        request.constrained.num_reported_tokens = num_tokens
        if constraint.error is not None:  # even at an end: masks that cannot be computed may allow nothing else
            output.finish_reason = FinishReason.ERROR
            output.stop_reason = constraint.error
        elif output.finish_reason is not None:
            return
        elif (forced := constraint.forced()) and self._ends_early(request, forced[0]):
            output.finish_reason = FinishReason.STOP
            output.stop_reason = "the grammar allows no further token"
        elif num_tokens > num_sampled:
            self._unsent.append((request, num_sampled))

    @staticmethod
    def _ends_early(request: Request, token: int) -> bool:
        """Whether a forced token would end the request before min_tokens. No other token may follow, so the request
        ends without it."""
        return token in request.stop_token_ids and len(request.token_ids) < request.min_total_tokens

    @staticmethod
    def skips(request: Request) -> bool:
        """Whether a request with a token in flight is left out of the next step, so that a long stretch of forced
        tokens can be taken ahead once nothing is in flight."""
        assert request.constrained is not None
        return request.constrained.takes_ahead and len(request.constrained.constraint.forced()) > LONG_STRETCH

    def send_known_tokens(self, step: SchedulerOutput) -> None:
        """Send the worker the tokens that requests of a new step have taken ahead."""
        unsent = self._unsent
        self._unsent = []
        edits = step.known_tokens
        for request, start in unsent:
            if request.status is not Status.RUNNING:
                continue  # all its tokens are sent when it is assigned a row again
            if not request.holds:  # it is not in the step, since it found no free blocks
                self._unsent.append((request, start))
                continue
            token_ids = request.token_ids[start:]
            edits.rows.extend([request.row] * len(token_ids))
            edits.positions.extend(range(start, start + len(token_ids)))
            edits.token_ids.extend(token_ids)

    # ---- drafts

    @staticmethod
    def check_drafts(constrained: ConstrainedOutput, drafts: list[int]) -> list[int]:
        """Advance a request's constraint over the drafts that it allows. Returns these drafts."""
        constraint = constrained.constraint
        constrained.ahead = ahead = []
        for token in drafts:
            constraint = constraint.fork()
            constraint.advance(token)
            if constraint.error is not None:
                break
            ahead.append(constraint)
        return drafts[: len(ahead)]

    # ---- masks

    def need_masks(self, requests: Sequence[Request]) -> bool:
        """Whether the last scheduled step, with these requests, may need masks."""
        return self.count > 0 and any(
            request.constrained is not None and request.num_in_flight_samples for request in requests
        )

    def begin_masks(self, step: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Start to fill the masks of a step with these requests. The results of all earlier steps must be known."""
        places = []
        constraints = []
        place = 0
        for index, request in enumerate(requests):
            if not request.num_in_flight_samples:
                continue
            num_drafts = step.num_draft_tokens[index] if step.num_draft_tokens else 0
            if (constrained := request.constrained) is not None:
                for offset, constraint in enumerate((constrained.constraint, *constrained.ahead[:num_drafts])):
                    if constraint.is_active:
                        places.append(place + offset)
                        constraints.append(constraint)
            place += 1 + num_drafts
        self._masks = step, self._thread.submit(self._fill, places, constraints)

    def masks(self, step: SchedulerOutput, requests: Sequence[Request]) -> TokenMasks | None:
        """Return the masks of a step, None if it needs none. Waits until they are filled. Valid until the next masks
        are begun."""
        if self._masks is None or self._masks[0] is not step:
            self.begin_masks(step, requests)
        assert self._masks is not None
        return self._masks[1].result()

    def _fill(self, places: list[int], constraints: list[Constraint]) -> TokenMasks | None:
        if not places:
            return None
        if len(self._bits) < len(places):
            self._bits = _bits(2 * len(places), self._bits.shape[1])
        bits = self._bits[: len(places)]
        self._gate.fill(constraints, bits)
        return TokenMasks(places, bits.data.cast("B"))


class NoConstraints:
    """Replaces ConstrainedRequests in an engine whose requests have no constraints."""

    def begin(self, request: Request) -> Sequence[int]:
        return ()

    def finish(self, request: Request) -> None: ...

    def skips(self, request: Request) -> bool:
        return False

    def new_tokens(self, request: Request, sampled: list[int]) -> list[int]:
        return sampled

    def complete(self, request: Request, output: EngineCoreOutput, num_sampled: int) -> None: ...

    def send_known_tokens(self, step: SchedulerOutput) -> None: ...

    def need_masks(self, requests: Sequence[Request]) -> bool:
        return False

    def begin_masks(self, step: SchedulerOutput, requests: Sequence[Request]) -> None: ...

    def masks(self, step: SchedulerOutput, requests: Sequence[Request]) -> TokenMasks | None:
        return None


class StepMasks:
    """The token masks of the step that was submitted last."""

    def __init__(
        self,
        constraints: ConstrainedRequests | NoConstraints,
        submitted: Sequence[tuple[SchedulerOutput, list[Request]]],
    ) -> None:
        """submitted: the scheduler's steps, the latest last."""
        self._constraints = constraints
        self._submitted = submitted

    def are_needed(self) -> bool:
        """Whether the step needs masks. They can be filled when all earlier steps of its requests have retired, which
        with a pipeline is immediately."""
        return self._constraints.need_masks(self._submitted[-1][1])

    def begin(self) -> None:
        """Start to fill the masks of the step on another thread. The step must need masks."""
        self._constraints.begin_masks(*self._submitted[-1])

    def wait(self) -> TokenMasks | None:
        """Wait until the masks are filled. None if the step's constraints allow all tokens."""
        return self._constraints.masks(*self._submitted[-1])


def _bits(places: int, words: int) -> "np.ndarray":
    import numpy as np  # here, since the API process imports this module before the core has started

    return np.empty((places, words), np.int32)
