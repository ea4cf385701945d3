"""The scheduler decides which tokens each step computes. Pure Python over integers: no torch, no clock, no phases."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter

from quire.kv.hashing import request_keys
from quire.kv.manager import KVCacheManager
from quire.kv.specs import KVCacheSpec
from quire.kv.tiers import Tier
from quire.kv.transfers import Mover, Transfers
from quire.lora.gate import AdapterGate, NoAdapters
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.media import EncoderLimits
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.compression import Compression, NoCompression
from quire.scheduler.constraints import ConstrainedRequests, NoConstraints, StepMasks
from quire.scheduler.encoding import EncoderCache
from quire.scheduler.gate import Connector, Gate, WaitingRoom
from quire.scheduler.limits import SchedulerLimits, SchedulerStats
from quire.scheduler.outputs import add_logprobs, pooled_output
from quire.scheduler.queue import RequestQueue
from quire.scheduler.request import Request, Status
from quire.scheduler.speculation import NoSpeculation, Speculation
from quire.structured.gate import GrammarGate

_by_key = attrgetter("key")


class Scheduler:
    """Each step hands out a budget of tokens until every request's computed tokens have caught up with its known ones.

    This one rule covers chunked prefill, prefix caching (a request starts with computed > 0), preemption (computed goes
    back to 0) and resumption. Running requests come first, each with at least one token. Waiting requests follow while
    there is room. When there is no free block for a running request, the last request in the order of service loses its
    row and its blocks.
    """

    def __init__(  # noqa: PLR0913  # assembles its parts
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        kv_specs: list[KVCacheSpec],
        block_size: int,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
        gates: Sequence[Gate] = (),
        grammars: GrammarGate | None = None,
        vocab_size: int = 0,
        speculation: Speculation | None = None,
        adapters: AdapterGate | None = None,
        compression: Compression | None = None,
        tiers: Sequence[Tier] = (),
        mover: Mover | None = None,
        encoders: EncoderCache | None = None,
        connect_engines: Callable[[KVCacheManager], Connector] | None = None,
    ) -> None:
        """fingerprint: of the KV blocks, see `hash_root`. gates: a request must pass all of them, and `grammars` and
        `adapters`. vocab_size: the number of logits, for `grammars`. tiers: further storage for blocks. mover: copies
        blocks to and from tiers. connect_engines: creates the connector to other engines. None disables a feature."""
        limits.validate()
        self.limits = limits
        self._longest_chunk = limits.longest_chunk
        self._is_pipelined = limits.stages > 1
        chunk = limits.most_in_flight
        self.kv = KVCacheManager(num_blocks, kv_specs, block_size, chunk, enable_prefix_caching, fingerprint)
        self.kv.check_room(limits.max_model_len)
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.waiting = RequestQueue()
        self.transfers = Transfers(self.kv, tiers, mover) if mover and tiers else None
        self.connectors: list[Connector] = [self.transfers] if self.transfers else []
        if connect_engines is not None:
            self.connectors.append(connect_engines(self.kv))
        self.gates: list[Gate] = [*gates, *(gate for gate in (grammars, adapters) if gate), *self.connectors]
        self._constraints = ConstrainedRequests(grammars, vocab_size) if grammars else NoConstraints()
        self._adapters = adapters or NoAdapters()
        self.speculation = speculation or NoSpeculation()
        self._makes_drafts = self.speculation.is_active
        self._compression = compression or NoCompression()
        self._gated = WaitingRoom(self.gates)
        self.encoders = encoders or EncoderCache(EncoderLimits())
        self._is_exhausted = False  # whether the last step was empty and nothing has changed since
        self.running: list[Request] = []  # sorted in the order of service
        self.stats = SchedulerStats()
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._submitted: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self.masks = StepMasks(self._constraints, self._submitted)
        self._num_leaving = 0  # requests that no longer run, but hold their blocks until submitted steps retire
        self._num_preempted = 0  # requests among them that will return to the queue
        self._num_arrived = 0
        self._num_steps = 0
        self.epoch = 0  # how often the worker has skipped steps; see `update`

    # ---- requests come and go

    def add(self, source: EngineCoreRequest) -> None:
        if source.request_id in self.requests:
            raise ValueError(f"request id {source.request_id!r} is in use")
        self.limits.check(source)
        self._adapters.check(source)
        self.encoders.limits.check([item.place for item in source.media])
        self._num_arrived += 1
        priority = source.priority if self.limits.policy == "priority" else 0
        order = (priority, source.arrival_time, self._num_arrived)
        request = Request(source, order, request_keys(self.kv.block_size, source))
        self._compression.plan(request)
        request.is_limited = bool(source.media) or request.is_compressed
        self.requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state, from outside. Returns False if there is no unfinished request with this id."""
        if request_id not in self.requests:
            return False
        self._finish(self.requests[request_id])
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or bool(self._submitted)

    @property
    def has_work(self) -> bool:
        """Whether another step can make progress. If not, all unfinished requests wait at gates."""
        runnable = bool(self.requests) and not self._is_exhausted
        return runnable or bool(self._submitted) or self._gated.may_open

    def wake(self) -> None:
        """Make `open_gates` check the gates again. May be called from any thread."""
        self._gated.may_open = True

    def open_gates(self) -> list[EngineCoreOutput]:
        """Move the requests that pass all gates into the queue. Returns the outputs of requests that cannot run."""
        for connector in self.connectors:
            self._is_exhausted &= not connector.settle()
        if not self._gated.may_open:
            return []
        passed, failed = self._gated.open()
        for request in passed:
            self._push(request)
        for request, _, _ in failed:
            self._finish(request)
        return [EngineCoreOutput(request.request_id, [], kind, reason) for request, kind, reason in failed]

    def hold(self) -> None:
        """Send all requests back to the gates because a gate has closed. No step may be in flight."""
        while self.running:
            self._preempt(self.running[-1])
        for request in [self.waiting.pop() for _ in range(len(self.waiting))]:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if self._gated.passes(request):
            self._push(request)
        else:
            request.status = Status.GATED

    def _push(self, request: Request) -> None:
        for token in self._constraints.begin(request):
            request.token_ids.append(token)
        request.status = Status.WAITING
        self.waiting.push(request)
        self._is_exhausted = False

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step. Counters advance at once: the step counts as submitted until `update` retires it or
        `withdraw` takes it back."""
        self._num_steps += 1
        self._longest_chunk = self.limits.chunk(len(self.running) + len(self.waiting))
        self.speculation.propose(self.running)
        step = self.encoders.begin_step(SchedulerOutput(self._num_steps, epoch=self.epoch))
        requests: list[Request] = []
        budget = self._schedule_running(step, requests, self.limits.budget(self.running, self.waiting))
        self._schedule_waiting(step, requests, budget)
        self.kv.end_step()
        if requests:
            self._submitted.append((step, requests))
            for connector in self.connectors:
                connector.scheduled(step.step_id, requests)
        self._compression.free_blocks(step, requests, self.kv)
        self._constraints.send_known_tokens(step)
        for counts in (step.num_draft_tokens, step.num_next_drafts):
            if counts:
                counts += [0] * (len(step.rows) - len(counts))
        self._is_exhausted = not requests
        return step if requests else self.encoders.withdraw(step)

    def _schedule_running(self, step: SchedulerOutput, requests: list[Request], budget: int) -> int:
        running = self.running
        take = self._take
        position = 0
        all_have_room = True
        most = len(requests) + -(-len(running) // self.limits.stages)
        while position < len(running) and len(requests) < most:
            request = running[position]
            position += 1
            # keeps one token for each request that follows
            room = budget - min(len(running) - position, most - len(requests) - 1)
            while (count := take(request, room, step, requests)) is None and not self._num_leaving:
                self._preempt(running[-1])
                if request.status is not Status.RUNNING:
                    break
            if count is None:
                all_have_room = False
            else:
                budget -= count
        return budget if all_have_room else 0  # running requests that lack blocks go before waiting ones

    def _schedule_waiting(self, step: SchedulerOutput, requests: list[Request], budget: int) -> None:
        """Admit waiting requests in the order of service, while the KV cache has room for all their tokens.

        If a request begins with an image that the step cannot encode, its place, a row and blocks are reserved for it.
        Requests without media may overtake it if the step computes all their tokens. They do not use anything reserved
        for it, so it is admitted first as soon as its image can be encoded.
        """
        held: list[Request] = []  # requests that wait for the encoder
        # No request is admitted before a preempted request that has yet to return to the queue.
        while budget > 0 and len(self._free_rows) > len(held) and not self._num_preempted:
            request = self.waiting.peek()
            if request is None or (self.limits.whole_prompts and len(request.token_ids) > budget):
                break
            if held and request.source.media:
                held.append(self.waiting.pop())
                continue
            if self.transfers is not None and self._reads_cache(request) and self.transfers.load(request):
                self._gated.hold(self.waiting.pop())
                request.status = Status.GATED
                continue
            num_spared = sum(map(self.kv.needed_blocks, held))
            num_cached = self.kv.admit(request, self._reads_cache(request), num_spared)
            if num_cached is None:
                break
            if not self._can_begin(request, num_cached, budget, is_passing=bool(held)):
                self.kv.free(request)
                if not self.encoders.is_full(request, num_cached):
                    break
                held.append(self.waiting.pop())
                continue
            self._admit(request, num_cached, step)
            count = self._take(request, budget, step, requests)
            assert count, "the cache had room for all tokens of the request"
            budget -= count
        for request in held:
            self.waiting.push(request)

    def _can_begin(self, request: Request, num_cached: int, budget: int, is_passing: bool) -> bool:
        """Whether the step can compute the next tokens of a waiting request. A request that overtakes others must fit
        completely."""
        missing = len(request.token_ids) - num_cached
        room = min(budget, self._longest_chunk)
        if is_passing:
            return missing <= room
        return not request.source.media or self.encoders.limit(request, num_cached, min(missing, room), None) > 0

    def _admit(self, request: Request, num_cached: int, step: SchedulerOutput) -> None:
        """Assign a row to the next waiting request, which already has its cached blocks."""
        self.waiting.pop()
        if self.kv.enable_prefix_caching and not request.num_preemptions:
            self.stats.prefix_queries += len(request.token_ids) * self._reads_cache(request)
            self.stats.prefix_hits += num_cached
        if not request.num_retired_tokens:  # a preempted request finds its own blocks, which are not cache hits
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = request.num_retired_tokens = num_cached
        self.speculation.begin(request)
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_by_key)
        step.new_requests.append(request.admitted(self._adapters.place(request.source)))
        self.kv.write_tables(request, step.block_table_edits)

    def _reads_cache(self, request: Request) -> bool:
        # Once the first token is out, prompt logprobs have been reported, so the prefix cache may be used again.
        may_read = request.source.reads_prefix_cache or len(request.token_ids) > request.num_prompt_tokens
        return may_read and self.kv.enable_prefix_caching and not request.is_compressed

    def _take(self, request: Request, budget: int, step: SchedulerOutput, requests: list[Request]) -> int | None:
        """Put a request that has a row into the step, with up to `budget` tokens and slots for them in the KV cache.

        Returns the number of tokens: 0 if the request has nothing to compute until tokens in flight are known. Returns
        None, without any change, if the cache has too few free blocks. This runs for each request of each step, so
        rarely needed work is guarded by a flag instead of a call.
        """
        in_flight = request.num_in_flight_samples
        computed = request.num_computed_tokens
        known = len(request.token_ids) + in_flight
        if in_flight and (
            self._is_pipelined
            or known >= request.max_total_tokens
            or (request.constrained is not None and self._constraints.skips(request))
        ):
            return 0  # its last tokens are needed first, or end it, or it waits to take forced tokens ahead
        room = budget if budget < self._longest_chunk else self._longest_chunk
        count = known - computed
        if count > room:
            count = room
        if request.is_limited:
            computed, count = self._limit(request, known, room, step)
        if not count:
            return 0
        end = computed + count
        blocks = request.blocks
        if end > blocks.capacity and not self.kv.allocate(request, end, step.block_table_edits):
            return None
        if end == known:
            if self._makes_drafts:
                num_requests = len(self.running) + min(len(self.waiting), len(self._free_rows))
                end += self.speculation.extend(request, end, room - count, num_requests, step, self.kv)
                count = end - computed
            request.num_in_flight_samples = in_flight + 1 + end - known
        step.rows.append(request.row)
        step.num_tokens.append(count)
        requests.append(request)
        if request.is_limited:
            request.num_retired_tokens -= self._compression.computed(request, computed, end, step)
            self.encoders.computed(request, end)
        request.num_computed_tokens = end
        request.holds += 1
        if end >= blocks.next_hash_at:
            self.kv.hash_full_blocks(request)
        return count

    def _limit(self, request: Request, known: int, room: int, step: SchedulerOutput) -> tuple[int, int]:
        """Return where the next tokens of a request with media or a compressed cache start, and how many of them (at
        most `room`) the step can compute."""
        start, count = self._compression.span(request, known, room)
        return start, self.encoders.limit(request, start, count, step)

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Retire the oldest submitted step: append the sampled tokens to its requests, and finish and free requests.

        If the worker skipped that step, it also skips all later steps of the same epoch. Then all submitted steps are
        withdrawn, the refused requests fail, and a new epoch begins. Do not pass the results of withdrawn steps to this
        method.
        """
        step, requests = self._submitted[0]
        if step.step_id != output.step_id or len(output.sampled_token_ids) != len(requests) * (not output.was_skipped):
            raise ValueError(f"expected the results of step {step.step_id}, got those of step {output.step_id}")
        if output.was_skipped:
            return self._begin_epoch(requests, output.refusals)
        self._submitted.popleft()
        self._is_exhausted = False
        for connector in self.connectors:
            connector.retired(step.step_id)
        self.stats.computed_tokens += sum(step.num_tokens)
        outputs = self._refuse(requests, output.refusals)
        outputs += [pooled_output(each, output.pooled[index]) for index, each in self._end(requests, output.pooled)]
        drafts = step.num_draft_tokens or repeat(0, len(requests))
        columns = zip(requests, step.num_tokens, drafts, output.sampled_token_ids, strict=True)
        for request, count, num_drafts, sampled in columns:
            status = request.status
            request.holds -= 1
            request.num_retired_tokens += count
            if sampled:
                request.num_in_flight_samples -= 1 + num_drafts
                if num_drafts:
                    self._roll_back(request, num_drafts, len(sampled) - 1)
                if status is not Status.FINISHED:
                    outputs.append(self._advance(request, sampled, num_drafts))
            if status is not Status.RUNNING and not request.holds:  # it was already leaving
                self._release(request)
        self.stats.generated_tokens += sum(len(request_output.new_token_ids) for request_output in outputs)
        self.speculation.receive(requests, output.draft_token_ids)
        if output.logprobs or output.prompt_logprobs:
            add_logprobs(outputs, requests, output)
        return outputs

    def _begin_epoch(self, requests: list[Request], refusals: dict[int, str]) -> list[EngineCoreOutput]:
        """Withdraw all submitted steps, since the worker skips them. requests: those of the oldest step."""
        while self._submitted:
            self.withdraw(self._submitted[-1][0])
        self.epoch += 1
        return self._refuse(requests, refusals)

    def _end(self, requests: list[Request], indices: Iterable[int]) -> Iterator[tuple[int, Request]]:
        """End requests of a retiring step, by index. Yields those that had not already ended."""
        for index in indices:
            request = requests[index]
            if request.status is not Status.FINISHED:
                self._finish(request)
                yield index, request

    def _refuse(self, requests: list[Request], refusals: dict[int, str]) -> list[EngineCoreOutput]:
        """Fail the refused requests of a step, by index, with the given reasons."""
        ended = self._end(requests, refusals)
        return [EngineCoreOutput(each.request_id, [], FinishReason.ERROR, refusals[index]) for index, each in ended]

    def _roll_back(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Subtract rejected drafts from the computed tokens."""
        num_rejected = num_drafts - num_accepted
        request.num_computed_tokens -= num_rejected
        request.num_retired_tokens -= num_rejected
        self.stats.computed_tokens -= num_rejected
        self.speculation.verified(request, num_drafts, num_accepted)

    def _advance(self, request: Request, sampled: list[int], num_drafts: int) -> EngineCoreOutput:
        """Append the sampled tokens and those forced by a constraint, up to the first one that ends the request."""
        token_ids = request.token_ids
        output = EngineCoreOutput(request.request_id, sampled, None, None, request.num_cached_tokens)
        output.num_preemptions = request.num_preemptions
        output.num_draft_tokens = num_drafts
        output.num_accepted_tokens = len(sampled) - 1
        before = len(token_ids)
        is_constrained = request.constrained is not None
        for token in self._constraints.new_tokens(request, sampled) if is_constrained else sampled:
            token_ids.append(token)
            total = len(token_ids)
            repeats = request.repetition is not None and request.repetition.append(token)
            if token in request.stop_token_ids and total > request.min_total_tokens:
                output.finish_reason = FinishReason.STOP
                output.stop_reason = None if token == request.source.eos_token_id else token
            elif total >= request.max_total_tokens:
                output.finish_reason = FinishReason.LENGTH
            elif repeats and total >= request.min_total_tokens:
                output.finish_reason = FinishReason.REPETITION
                output.stop_reason = "repetition_detected"
            else:
                continue
            output.new_token_ids = sampled[: total - before]
            break
        if is_constrained:
            self._constraints.complete(request, output, before + len(sampled))
        if output.finish_reason is not None:
            self._finish(request)
        return output

    def withdraw(self, step: SchedulerOutput) -> None:
        """Take back the last scheduled step, which was not run. Its requests are preempted.

        Their full blocks of retired steps stay in the prefix cache, so little is recomputed.
        """
        last, requests = self._submitted.pop()
        assert last is step, "only the last step can be withdrawn"
        self.encoders.withdraw(step)
        for connector in self.connectors:
            connector.withdrawn(step.step_id)
        drafts = step.num_draft_tokens or repeat(0, len(requests))
        for request, count, num_drafts in zip(requests, step.num_tokens, drafts, strict=True):
            start = request.num_computed_tokens - count
            if request.num_computed_tokens >= len(request.token_ids):  # the step would have sampled
                request.num_in_flight_samples -= 1 + num_drafts
            request.holds -= 1
            self.kv.withdraw_hashes(request, start)
            request.num_computed_tokens = start
            if start == request.num_cached_tokens:  # it was the first step, so the next admission counts hits again
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
        self.speculation.finish(request)
        self._adapters.finish(request.source)
        self._constraints.finish(request)
        for connector in self.connectors:
            connector.finish(request.source)
        self._leave(request, Status.FINISHED)

    def _leave(self, request: Request, status: Status) -> None:
        """Remove a request from the queue or the batch. Release its row and blocks once no submitted step uses it."""
        previous = request.status
        request.status = status
        self._is_exhausted = False
        self.encoders.leave(request)
        if previous is Status.WAITING:
            self.waiting.discard(request)
        elif previous is Status.GATED:
            del self._gated.requests[request.request_id]
        elif previous is Status.PREEMPTED:  # it is already leaving; now it will not return to the queue
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
            self._compression.plan(request)
            self._enqueue(request)
