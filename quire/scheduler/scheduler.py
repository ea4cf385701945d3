"""Which tokens run now. Pure Python over integers: no torch, no clock, no phase."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from quire.kvcache.hashing import extra_keys
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.specs import KVCacheSpec
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.errors import error_text
from quire.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenMasks
from quire.scheduler.gate import Gate
from quire.scheduler.queue import RequestQueue
from quire.scheduler.request import Request, Status

_by_key = attrgetter("key")


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step.

    depth: how many steps may be submitted and not retired. long_prefill_token_threshold: tokens that one request may
    have in a step, 0 for no limit of its own.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    depth: int = 1
    long_prefill_token_threshold: int = 0

    @property
    def longest_chunk(self) -> int:
        """Tokens that one request may have in a step."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)

    def validate(self) -> None:
        """Raises ValueError for limits that contradict each other."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request gets a token each step"
            )


@dataclass
class SchedulerStats:
    """Counted since the start."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens of requests that were looked up, at their first admission
    prefix_hits: int = 0  # of those, tokens that needed no computing
    computed_tokens: int = 0  # by the steps that were retired


class Scheduler:
    """Each step hands out a budget of tokens until every request's computed tokens have caught up with its known ones.

    Chunked prefill, prefix caching (start with computed > 0), preemption (computed back to 0) and resumption are this
    one rule. Running requests come first, each with at least one token; then waiting ones while there is room. When
    a running request finds no block, the last one in the order of service loses its row and its blocks.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        kv_specs: list[KVCacheSpec],
        block_size: int,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
        gates: Sequence[Gate] = (),
    ) -> None:
        """fingerprint: of the KV blocks, see `hash_root`. gates: all of them have to let a request pass."""
        limits.validate()
        self.limits = limits
        self._longest_chunk = limits.longest_chunk
        chunk = limits.max_num_batched_tokens * limits.depth
        self.kv = KVCacheManager(num_blocks, kv_specs, block_size, chunk, enable_prefix_caching, fingerprint)
        if self.kv.max_blocks(limits.max_model_len) > self.kv.pool.num_usable:
            raise ValueError(
                f"a request of max_model_len={limits.max_model_len} tokens needs "
                f"{self.kv.max_blocks(limits.max_model_len)} KV blocks, but there are {self.kv.pool.num_usable}; "
                "lower max_model_len or raise kv_cache_memory_bytes"
            )
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.waiting = RequestQueue()
        self.gates = gates
        self._gated: dict[str, Request] = {}  # requests that wait at a gate
        self._gates_may_open = False  # whether the gates are to be asked again
        self._is_exhausted = False  # whether the last step was empty, and nothing has changed since
        self.running: list[Request] = []  # sorted in the order of service
        self.stats = SchedulerStats()
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._submitted: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._num_leaving = 0  # requests that lost their place, whose blocks wait for a submitted step to retire
        self._num_preempted = 0  # of those, requests that will be back in the queue
        self._num_arrived = 0
        self._num_steps = 0
        self.epoch = 0  # how often the worker has skipped steps; see `update`

    # ---- requests come and go

    def add(self, source: EngineCoreRequest) -> None:
        if source.request_id in self.requests:
            raise ValueError(f"request id {source.request_id!r} is in use")
        if (source.sampling_params is None) == (source.pooling_params is None):
            raise ValueError(f"request {source.request_id}: give either sampling_params or pooling_params")
        if not source.prompt_token_ids or len(source.prompt_token_ids) + source.max_tokens > self.limits.max_model_len:
            raise ValueError(
                f"request {source.request_id}: a prompt of {len(source.prompt_token_ids)} tokens and max_tokens="
                f"{source.max_tokens} do not fit max_model_len={self.limits.max_model_len}"
            )
        self._num_arrived += 1
        priority = source.priority if self.limits.policy == "priority" else 0
        key = (priority, source.arrival_time, self._num_arrived)
        request = Request(source, key, extra_keys(self.kv.block_size, source.cache_salt))
        self.requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """End a request from outside, in whatever state it is. False if it is not known (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request)
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or bool(self._submitted)

    @property
    def has_work(self) -> bool:
        """Whether a step could change anything. If not, unfinished requests wait at gates."""
        runnable = bool(self.requests) and not self._is_exhausted
        return runnable or bool(self._submitted) or self._gates_may_open

    def wake(self) -> None:
        """Have the gates asked again. May be called from any thread."""
        self._gates_may_open = True

    def open_gates(self) -> list[EngineCoreOutput]:
        """Move the requests that all gates let pass into the queue. The ends of those that can never run."""
        if not self._gates_may_open:
            return []
        self._gates_may_open = False  # before the gates are asked: they may call `wake` meanwhile
        failed = []
        for request in list(self._gated.values()):
            try:
                if all(gate.ready(request.source) for gate in self.gates):
                    del self._gated[request.request_id]
                    self._push(request)
            except ValueError as error:
                self._finish(request)
                failed.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error_text(error)))
        return failed

    def _enqueue(self, request: Request) -> None:
        if self.gates:
            request.status = Status.GATED
            self._gated[request.request_id] = request
            self._gates_may_open = True
        else:
            self._push(request)

    def _push(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.push(request)
        self._is_exhausted = False

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """The next step. Counters advance at once: the step is taken as submitted until `update` or `withdraw`."""
        self._num_steps += 1
        self.kv.begin_step()
        step = SchedulerOutput(self._num_steps, epoch=self.epoch)
        requests: list[Request] = []
        budget = self._schedule_running(step, requests, self.limits.max_num_batched_tokens)
        self._schedule_waiting(step, requests, budget)
        if requests:
            self._submitted.append((step, requests))
        self._is_exhausted = not requests
        return step

    def needs_masks(self, step: SchedulerOutput) -> bool:
        """Whether some of its places may draw only certain tokens, which are known when the step before has retired."""
        return False

    def token_masks(self, step: SchedulerOutput) -> TokenMasks | None:
        """The masks of such a step. Asked when all steps before it have retired."""
        return None

    def _schedule_running(self, step: SchedulerOutput, requests: list[Request], budget: int) -> int:
        running, take = self.running, self._take
        position, all_have_room = 0, True
        while position < len(running):
            request = running[position]
            position += 1
            room = budget - (len(running) - position)  # leaves one for each of the others
            while (count := take(request, room, step, requests)) is None and not self._num_leaving:
                self._preempt(running[-1])
                if request.status is not Status.RUNNING:
                    break
            if count is None:
                all_have_room = False
            else:
                budget -= count
        return budget if all_have_room else 0  # requests that wait for blocks come before requests that wait for a row

    def _schedule_waiting(self, step: SchedulerOutput, requests: list[Request], budget: int) -> None:
        # A preempted request that is not back in the queue yet has its place before those that are.
        while budget > 0 and self._free_rows and not self._num_preempted:
            request = self.waiting.peek()
            if request is None or not self._admit(request, step):
                return
            count = self._take(request, budget, step, requests)
            assert count, "there was room for all its tokens"
            budget -= count

    def _admit(self, request: Request, step: SchedulerOutput) -> bool:
        """Give a waiting request a row and its cached blocks. False if the cache has no room for all its tokens."""
        known, source = len(request.token_ids), request.source
        # Once the first token is out, the logprobs of the prompt have been reported, and its cached blocks will do.
        read_cache = source.reads_prefix_cache or known > request.num_prompt_tokens
        num_cached = self.kv.admit(request, read_cache)
        if num_cached is None:
            return False
        self.waiting.pop()
        if self.kv.enable_prefix_caching and not request.num_preemptions:
            self.stats.prefix_queries += known * read_cache
            self.stats.prefix_hits += num_cached
        if not request.num_retired_tokens:  # else it was preempted: what it finds now are its own blocks
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = request.num_retired_tokens = num_cached
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_by_key)
        step.new_requests.append(
            NewRequest(
                request.request_id,
                request.row,
                list(request.token_ids),
                request.num_prompt_tokens,
                num_cached,
                source.sampling_params,
                source.seed,
                sorted(request.stop_token_ids) if request.min_total_tokens > request.num_prompt_tokens else [],
                source.bad_words,
                source.pooling_params,
            )
        )
        self.kv.write_tables(request, step.block_table_edits)
        return True

    def _take(self, request: Request, budget: int, step: SchedulerOutput, requests: list[Request]) -> int | None:
        """Put a request that has a row into the step, with up to `budget` tokens and slots for them in the KV cache.

        The number of tokens that it got: 0 if it has no more to compute until tokens in flight are known. None, and
        nothing is changed, if the cache has too few free blocks.
        """
        in_flight, computed = request.num_in_flight_samples, request.num_computed_tokens
        known = len(request.token_ids) + in_flight
        if in_flight and known >= request.max_total_tokens:
            return 0  # its last tokens are in flight
        count = known - computed
        if count > budget:
            count = budget
        if count > self._longest_chunk:
            count = self._longest_chunk
        if not count:
            return 0
        end = computed + count
        if end > request.capacity and not self.kv.allocate(request, end, step.block_table_edits):
            return None
        step.rows.append(request.row)
        step.num_tokens.append(count)
        requests.append(request)
        request.num_computed_tokens = end
        request.holds += 1
        if end == known:
            request.num_in_flight_samples = in_flight + 1
        if end >= request.next_hash_at:
            self.kv.hash_full_blocks(request)
        return count

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Retire the oldest submitted step: advance its requests by what they sampled, finish, free.

        If the worker skipped that step, it skips all later ones of the same epoch too. Then all submitted steps are
        withdrawn, the requests that were refused fail, and a new epoch begins. The results of the withdrawn steps must
        not be given to this method.
        """
        step, requests = self._submitted[0]
        if step.step_id != output.step_id or len(output.sampled_token_ids) != len(requests) * (not output.was_skipped):
            raise ValueError(f"expected the results of step {step.step_id}, got those of step {output.step_id}")
        if output.was_skipped:
            return self._end_epoch({requests[place]: reason for place, reason in output.refusals.items()})
        self._submitted.popleft()
        self._is_exhausted = False
        self.stats.computed_tokens += sum(step.num_tokens)
        outputs: list[EngineCoreOutput] = []
        for request, count, sampled in zip(requests, step.num_tokens, output.sampled_token_ids, strict=True):
            status = request.status
            request.holds -= 1
            request.num_retired_tokens += count
            if sampled:
                request.num_in_flight_samples -= 1
                if status is not Status.FINISHED:
                    outputs.append(self._advance(request, sampled))
            if status is not Status.RUNNING and not request.holds:  # it was leaving already
                self._release(request)
        if output.logprobs or output.prompt_logprobs:
            made = {made.request_id: made for made in outputs}
            for place, request in enumerate(requests):
                if request.request_id in made:
                    made[request.request_id].logprobs = output.logprobs.get(place)
                    made[request.request_id].prompt_logprobs = output.prompt_logprobs.get(place)
        return outputs

    def _advance(self, request: Request, sampled: list[int]) -> EngineCoreOutput:
        """Append tokens up to the first that ends the request."""
        token_ids = request.token_ids
        output = EngineCoreOutput(request.request_id, sampled, None, None, request.num_cached_tokens)
        output.num_preemptions = request.num_preemptions
        before = len(token_ids)
        for token in sampled:
            token_ids.append(token)
            total = len(token_ids)
            repeats = request.repetition is not None and request.repetition.append(token)
            if token in request.stop_token_ids and total > request.min_total_tokens:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = None if token == request.source.eos_token_id else token
            elif total >= request.max_total_tokens:
                output.finish_reason = FinishReason.LENGTH
            elif repeats and total >= request.min_total_tokens:
                output.finish_reason, output.stop_reason = FinishReason.REPETITION, "repetition_detected"
            else:
                continue
            output.new_token_ids = sampled[: total - before]
            self._finish(request)
            break
        return output

    def _end_epoch(self, refusals: dict[Request, str]) -> list[EngineCoreOutput]:
        """Withdraw all submitted steps, and fail requests for the given reasons."""
        while self._submitted:
            self.withdraw(self._submitted[-1][0])
        self.epoch += 1
        outputs = []
        for request, reason in refusals.items():
            if request.status is not Status.FINISHED:  # it may have been aborted since
                self._finish(request)
                outputs.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, reason))
        return outputs

    def withdraw(self, step: SchedulerOutput) -> None:
        """Take back the step that was scheduled last and was not run. Its requests are preempted.

        What they computed in retired steps stays findable in the prefix cache, so little is computed again.
        """
        last, requests = self._submitted.pop()
        assert last is step, "only the last step can be withdrawn"
        for request, count in zip(requests, step.num_tokens, strict=True):
            start = request.num_computed_tokens - count
            if request.num_computed_tokens >= len(request.token_ids):  # the step would have sampled
                request.num_in_flight_samples -= 1
            request.holds -= 1
            self.kv.withdraw_hashes(request, start)
            request.num_computed_tokens = start
            if start == request.num_cached_tokens:  # it was the first step: the next one counts its hits afresh
                request.num_retired_tokens = 0
        for request in requests:
            if request.status is Status.RUNNING:
                self._preempt(request)
            elif not request.holds:
                self._release(request)

    # ---- leaving

    def _preempt(self, request: Request) -> None:
        self.stats.preemptions += 1
        request.num_preemptions += 1
        self._leave(request, Status.PREEMPTED)

    def _finish(self, request: Request) -> None:
        del self.requests[request.request_id]
        self._leave(request, Status.FINISHED)

    def _leave(self, request: Request, status: Status) -> None:
        """Give up the place in the queue or in the batch; row and blocks once no submitted step names them."""
        previous, request.status = request.status, status
        self._is_exhausted = False
        if previous is Status.WAITING:
            self.waiting.discard(request)
        elif previous is Status.GATED:
            del self._gated[request.request_id]
        elif previous is Status.PREEMPTED:  # it is leaving already, and will not be back
            self._num_preempted -= 1
        elif previous is Status.RUNNING:
            del self.running[bisect_left(self.running, request.key, key=_by_key)]
            self._num_leaving += 1
            self._num_preempted += status is Status.PREEMPTED
            if not request.holds:
                self._release(request)

    def _release(self, request: Request) -> None:
        self._num_leaving -= 1
        self.kv.free(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.num_computed_tokens = 0
        if request.status is Status.PREEMPTED:
            self._num_preempted -= 1
            self._enqueue(request)
