"""The scheduler decides which tokens each step computes. Pure Python over integers: no torch, no clock, no phases."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter

from quire.kv.hashing import extra_keys
from quire.kv.manager import KVCacheManager
from quire.kv.specs import KVCacheSpec
from quire.kv.tiers import Tier
from quire.kv.transfers import Mover, Transfers
from quire.lora.gate import AdapterGate
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.media import EncoderLimits
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.compression import Compression
from quire.scheduler.constraints import ConstrainedRequests, StepMasks
from quire.scheduler.encoding import EncoderCache
from quire.scheduler.gate import Connector, Gate, WaitingRoom
from quire.scheduler.limits import SchedulerLimits, SchedulerStats
from quire.scheduler.queue import RequestQueue
from quire.scheduler.request import Request, Status
from quire.scheduler.speculation import Speculation
from quire.structured.gate import GrammarGate

_by_key = attrgetter("key")


class Scheduler:
    """Each step hands out a budget of tokens until every request's computed tokens have caught up with its known ones.

    This one rule covers chunked prefill, prefix caching (a request starts with computed > 0), preemption (computed goes
    back to 0) and resumption. Running requests come first, each with at least one token. Waiting requests follow while
    there is room. When a running request finds no free block, the last request in the order of service loses its row
    and its blocks.
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
    ) -> None:
        """fingerprint: of the KV blocks, see `hash_root`. gates: a request passes all, and `grammars` and `adapters`.
        vocab_size: the number of logits, for `grammars`. speculation, compression: None for none. tiers: where blocks
        are kept beyond the pool. mover: copies blocks to them and back. encoders: None for no media."""
        limits.validate()
        self.limits = limits
        self._longest_chunk = limits.longest_chunk
        self._is_pipelined = limits.stages > 1
        chunk = limits.most_in_flight
        self.kv = KVCacheManager(num_blocks, kv_specs, block_size, chunk, enable_prefix_caching, fingerprint)
        self.kv.check_room(limits.max_model_len)
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.waiting = RequestQueue()
        self.transfers = None if mover is None or not tiers else Transfers(self.kv, tiers, mover)
        self.connectors: list[Connector] = [] if self.transfers is None else [self.transfers]
        self.gates = [*gates, *(gate for gate in (grammars, adapters) if gate is not None), *self.connectors]
        self._constrained = None if grammars is None else ConstrainedRequests(grammars, vocab_size)
        self._adapters = adapters
        self.speculation = speculation
        self._compression = compression
        self._gated, self.encoders = WaitingRoom(self.gates), encoders or EncoderCache(EncoderLimits())
        self._is_exhausted = False  # whether the last step was empty and nothing has changed since
        self.running: list[Request] = []  # sorted in the order of service
        self.stats = SchedulerStats()
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._submitted: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self.masks = StepMasks(self._constrained, self._submitted)
        self._num_leaving = 0  # requests that no longer run, but keep their blocks until submitted steps retire
        self._num_preempted = 0  # requests among them that will return to the queue
        self._num_arrived = 0
        self._num_steps = 0
        self.epoch = 0  # how often the worker has skipped steps; see `update`

    # ---- requests come and go

    def add(self, source: EngineCoreRequest) -> None:
        if source.request_id in self.requests:
            raise ValueError(f"request id {source.request_id!r} is in use")
        self.limits.check(source)
        key = None if source.adapter is None else source.adapter.key
        if key is not None and self._adapters is None:
            raise ValueError(f"request {source.request_id}: its adapter needs an engine with enable_lora")
        self.encoders.limits.check([item.place for item in source.media])
        self._num_arrived += 1
        priority = source.priority if self.limits.policy == "priority" else 0
        order = (priority, source.arrival_time, self._num_arrived)
        ranges = [(item.place.start, item.place.end, item.place.key) for item in source.media]
        request = Request(source, order, extra_keys(self.kv.block_size, source.cache_salt, ranges, key))
        if self._compression is not None:
            self._compression.plan(request)
        self.requests[request.request_id] = request
        self._enqueue(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state, from outside. Returns False if there is no unfinished request with this id."""
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
        """Whether another step may make progress. If not, all unfinished requests wait at gates."""
        runnable = bool(self.requests) and not self._is_exhausted
        return runnable or bool(self._submitted) or self._gated.may_open

    def wake(self) -> None:
        """Make `open_gates` ask the gates again. May be called from any thread."""
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
        """Have all requests ask the gates again, of which one is closed now. No step may be in flight."""
        while self.running:
            self._preempt(self.running[-1])
        for request in [self.waiting.pop() for _ in range(len(self.waiting))]:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if self._gated.passes(request):
            self._push(request)

    def _push(self, request: Request) -> None:
        if self._constrained is not None:
            self._constrained.begin(request)
        request.status = Status.WAITING
        self.waiting.push(request)
        self._is_exhausted = False

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step. Counters advance at once: the step counts as submitted until `update` retires it or
        `withdraw` takes it back."""
        self._num_steps += 1
        self._longest_chunk = self.limits.chunk(len(self.running) + len(self.waiting))
        if self.speculation is not None:
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
        if self._compression is not None:
            self._compression.free_blocks(step, requests, self.kv)
        if self._constrained is not None:
            self._constrained.send_known_tokens(step)
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
        return budget if all_have_room else 0  # a running request that lacks blocks goes before requests without a row

    def _schedule_waiting(self, step: SchedulerOutput, requests: list[Request], budget: int) -> None:
        # No request is admitted before a preempted request that has yet to return to the queue.
        while budget > 0 and self._free_rows and not self._num_preempted:
            request = self.waiting.peek()
            if request is None or (self.limits.whole_prompts and len(request.token_ids) > budget):
                return
            if self.transfers is not None and self._reads_cache(request) and self.transfers.load(request):
                self.waiting.pop()
                self._gated.hold(request)
                continue
            if not self._admit(request, step, budget):
                return
            count = self._take(request, budget, step, requests)
            assert count, "the cache had room for all tokens of the request"
            budget -= count

    def _admit(self, request: Request, step: SchedulerOutput, budget: int) -> bool:
        """Give a waiting request a row and its cached blocks. Returns False, without any change, if the KV cache has no
        room for all its tokens, or if it begins with a picture that the step cannot encode."""
        known = len(request.token_ids)
        source = request.source
        read_cache = self._reads_cache(request)
        num_cached = self.kv.admit(request, read_cache)
        if num_cached is None:
            return False
        if source.media and not self.encoders.limit(request, num_cached, min(known - num_cached, budget), None):
            self.kv.free(request)
            return False
        self.waiting.pop()
        if self.kv.enable_prefix_caching and not request.num_preemptions:
            self.stats.prefix_queries += known * read_cache
            self.stats.prefix_hits += num_cached
        if not request.num_retired_tokens:  # a preempted request finds its own blocks, which are not cache hits
            request.num_cached_tokens = num_cached
        request.num_computed_tokens = request.num_retired_tokens = num_cached
        request.drafts, request.num_device_drafts = [], 0  # it may have been preempted before they were sent
        request.row = self._free_rows.pop()
        request.status = Status.RUNNING
        insort(self.running, request, key=_by_key)
        place = None if source.adapter is None or self._adapters is None else self._adapters.place(source.adapter)
        step.new_requests.append(request.admitted(place))
        self.kv.write_tables(request, step.block_table_edits)
        return True

    def _reads_cache(self, request: Request) -> bool:
        # Once the first token is out, prompt logprobs have been reported, so the prefix cache may be used again.
        may_read = request.source.reads_prefix_cache or len(request.token_ids) > request.num_prompt_tokens
        return may_read and self.kv.enable_prefix_caching and not request.num_kept_blocks

    def _take(self, request: Request, budget: int, step: SchedulerOutput, requests: list[Request]) -> int | None:  # noqa: C901  # runs for each token
        """Put a request that has a row into the step, with up to `budget` tokens and slots for them in the KV cache.

        Returns the number of tokens: 0 if the request has nothing to compute until tokens in flight are known. Returns
        None, without any change, if the cache has too few free blocks.
        """
        in_flight = request.num_in_flight_samples
        computed = request.num_computed_tokens
        known = len(request.token_ids) + in_flight
        if in_flight and (
            self._is_pipelined
            or known >= request.max_total_tokens
            or (request.constraint is not None and ConstrainedRequests.skips(request))
        ):
            return 0  # the first stage needs its last tokens, or they end it, or it waits to take forced tokens ahead
        count = known - computed
        if count > budget:
            count = budget
        if count > self._longest_chunk:
            count = self._longest_chunk
        if request.num_kept_blocks and self._compression is not None:
            computed, count = self._compression.span(request, known, min(budget, self._longest_chunk))
        if request.source.media:
            count = self.encoders.limit(request, computed, count, step)
        if not count:
            return 0
        end = computed + count
        if end > request.capacity and not self.kv.allocate(request, end, step.block_table_edits):
            return None
        num_drafts = 0
        drafting = self.speculation
        if drafting is not None and end == known:
            room = min(budget, self._longest_chunk) - count
            num_drafts = drafting.add_drafts(request, min(room, request.compress_at - 1 - end), step, self.kv)
            count = count + num_drafts
            end = end + num_drafts
            known = known + num_drafts
            drafting.ask(request, end, len(self.running) + min(len(self.waiting), len(self._free_rows)), step, self.kv)
        step.rows.append(request.row)
        step.num_tokens.append(count)
        requests.append(request)
        again = request.num_computed_tokens - computed
        request.num_computed_tokens = end
        request.holds += 1
        if end == known:
            request.num_in_flight_samples = in_flight + 1 + num_drafts
        if end >= request.next_hash_at:
            self.kv.hash_full_blocks(request)
        if request.source.media:
            self.encoders.computed(request, end)
        if end == request.compress_at:
            step.compressions.append((len(step.rows) - 1, request.num_kept_blocks, again))
            request.num_retired_tokens -= again
        return count

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:  # noqa: C901, PLR0912  # as for _take
        """Retire the oldest submitted step: append the sampled tokens to its requests, and finish and free requests.

        If the worker skipped that step, it also skips all later steps of the same epoch. Then all submitted steps are
        withdrawn, the refused requests fail, and a new epoch begins. Do not pass the results of withdrawn steps to this
        method.
        """
        step, requests = self._submitted[0]
        if step.step_id != output.step_id or len(output.sampled_token_ids) != len(requests) * (not output.was_skipped):
            raise ValueError(f"expected the results of step {step.step_id}, got those of step {output.step_id}")
        if output.was_skipped:
            while self._submitted:
                self.withdraw(self._submitted[-1][0])
            self.epoch += 1
            return self._refuse(requests, output.refusals)
        self._submitted.popleft()
        self._is_exhausted = False
        for connector in self.connectors:
            connector.retired(step.step_id)
        self.stats.computed_tokens += sum(step.num_tokens)
        outputs = self._refuse(requests, output.refusals)
        drafts = step.num_draft_tokens or repeat(0, len(requests))
        if output.pooled:
            outputs += self._pooled(requests, output)
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
            if status is not Status.RUNNING and not request.holds:  # it was leaving already
                self._release(request)
        self.stats.generated_tokens += sum(len(request_output.new_token_ids) for request_output in outputs)
        if output.draft_token_ids and self.speculation is not None:
            self.speculation.receive(requests, output.draft_token_ids)
        if output.logprobs or output.prompt_logprobs:
            by_id = {each.request_id: each for each in outputs if each.new_token_ids}
            for index, request in enumerate(requests):
                if request.request_id in by_id:
                    by_id[request.request_id].logprobs = output.logprobs.get(index)
                    by_id[request.request_id].prompt_logprobs = output.prompt_logprobs.get(index)
        return outputs

    def _pooled(self, requests: list[Request], output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """End the requests of a retiring step that have their results."""
        outputs = []
        for index, pooled in output.pooled.items():
            request = requests[index]
            if request.status is not Status.FINISHED:
                self._finish(request)
                cached = request.num_cached_tokens
                outputs.append(EngineCoreOutput(request.request_id, [], FinishReason.STOP, None, cached, pooled=pooled))
        return outputs

    def _roll_back(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take the drafts that were not accepted off the computed tokens."""
        num_rejected = num_drafts - num_accepted
        request.num_computed_tokens -= num_rejected
        request.num_retired_tokens -= num_rejected
        self.stats.computed_tokens -= num_rejected
        assert self.speculation is not None
        self.speculation.verified(request, num_drafts, num_accepted)

    def _advance(self, request: Request, sampled: list[int], num_drafts: int) -> EngineCoreOutput:
        """Append the sampled tokens, and those that a constraint forces, up to the first one that ends the request."""
        token_ids = request.token_ids
        output = EngineCoreOutput(request.request_id, sampled, None, None, request.num_cached_tokens)
        output.num_preemptions = request.num_preemptions
        output.num_draft_tokens = num_drafts
        output.num_accepted_tokens = len(sampled) - 1
        before = len(token_ids)
        constrained = self._constrained if request.constraint is not None else None
        for token in sampled if constrained is None else constrained.new_tokens(request, sampled):
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
        if constrained is not None:
            constrained.complete(request, output, before + len(sampled))
        if output.finish_reason is not None:
            self._finish(request)
        return output

    def _refuse(self, requests: list[Request], refusals: dict[int, str]) -> list[EngineCoreOutput]:
        """Fail the refused requests of a step, by their index, with the given reasons."""
        outputs = []
        for index, reason in refusals.items():
            request = requests[index]
            if request.status is not Status.FINISHED:  # the request may have been aborted since
                self._finish(request)
                outputs.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, reason))
        return outputs

    def withdraw(self, step: SchedulerOutput) -> None:
        """Take back the step that was scheduled last and was not run. Its requests are preempted.

        Their full blocks of retired steps stay in the prefix cache, so little is computed again.
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
            if start == request.num_cached_tokens:  # it was the first step, so the next admission counts hits anew
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
        if self.speculation is not None:
            self.speculation.finish(request)
        if self._adapters is not None:
            self._adapters.finish(request.source)
        for connector in self.connectors:
            connector.finish(request.source)
        if self._constrained is not None:
            self._constrained.finish(request)
        self._leave(request, Status.FINISHED)

    def _leave(self, request: Request, status: Status) -> None:
        """Take a request out of the queue or the batch. Its row and blocks are released when no submitted step names
        it."""
        previous = request.status
        request.status = status
        self._is_exhausted = False
        self.encoders.leave(request)
        if previous is Status.WAITING:
            self.waiting.discard(request)
        elif previous is Status.GATED:
            del self._gated.requests[request.request_id]
        elif previous is Status.PREEMPTED:  # it is leaving already; now it will not return to the queue
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
            if self._compression is not None:
                self._compression.plan(request)
            self._enqueue(request)
