"""AsyncLLM: an engine with vLLM's asyncio interface, for many callers at once. The cores run in their own processes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from secrets import token_hex
from typing import Any, NamedTuple, get_args

from prometheus_client.metrics_core import Metric

from quire.config.engine import EngineConfig
from quire.engine.core_client import CoreClient, CoreState
from quire.engine.frontend import Frontend
from quire.engine.output_processor import DeltaReader, OutputProcessor
from quire.engine.pinned_prefixes import PinnedPrefixes
from quire.engine.pooling import pooling_request_output
from quire.engine.processor import MEDIA_FIELDS, ProcessedRequest, Prompt
from quire.messages.changes import (
    WEIGHT_GROUP,
    Command,
    JoinGroup,
    LeaveGroup,
    Look,
    Pause,
    PauseMode,
    PinPrefix,
    ReadWeights,
    ReceiveWeights,
    Resume,
    TakeWeights,
    sleep,
    wake_up,
)
from quire.messages.engine import CoreStats, EngineCoreOutput
from quire.messages.lora import Adapter, LoRARequest
from quire.messages.outputs import PoolingRequestOutput, RequestOutput
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.models.heads.resolve import with_files
from quire.observability.engine import EngineMetrics
from quire.observability.logging import logger
from quire.observability.profiling import client as profiling
from quire.platform.untrusted.limits import BusyError
from quire.text.tokenizer import Tokenizer

SLICE = 32  # outputs of a step that are detokenized before other callers get a turn
LONG_PROMPT = 20_000  # characters; longer prompts are tokenized in a thread, outside the event loop


class _Mailbox:
    """The outputs that have changed since the last read. Each is stored at most once, however slow the reader is."""

    def __init__(self) -> None:
        self.grown: dict[str, RequestOutput] = {}
        self.news = asyncio.Event()


class _Running(NamedTuple):
    request: ProcessedRequest
    output: RequestOutput
    mailbox: _Mailbox


class AsyncLLM:
    """A model behind an asyncio interface. Call `start` before anything else, and `shutdown` at the end.

    model, options: as for `LLM`. metrics_prefix: the prefix of the Prometheus metrics' names. served_name: the model's
    name in the metrics' labels. log_stats: keep statistics for the metrics and the periodic log line. core: a client of
    cores that were already started; it brings its own model and options. Raises ConfigError (a ValueError) for unknown
    or unsupported options.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        metrics_prefix: str = "quire",
        served_name: str | None = None,
        log_stats: bool = True,
        core: CoreClient | None = None,
        **options: Any,
    ) -> None:
        if core is None:
            config = EngineConfig.create(model=None if model is None else str(model), **options)
            core = CoreClient(*with_files(config))
        self.client = core
        self.config = core.config
        try:
            self.frontend = Frontend(self.config, core.directory, in_process=False)
        except BaseException:
            core.kill()
            raise
        self.processor = self.frontend.processor
        self._long_prompt = min(LONG_PROMPT, self.frontend.tokenizer.longest_quick or LONG_PROMPT)
        self.output_processor = OutputProcessor(self.frontend.tokenizer, self.config.scheduler)
        name = served_name or self.config.model.model or "quire"
        lora = self.config.lora
        max_loras = lora.max_loras if lora.enable_lora else 0
        is_first = core.index == 0
        buckets = self.config.metrics.buckets
        self.metrics = EngineMetrics(
            metrics_prefix, name, log_stats, max_loras, len(core.sizes), is_first, core.since_start, core.first, buckets
        )
        self._pinned = PinnedPrefixes(core, self._compute)
        self.prefixes = self._pinned.by_id
        self._weights_lock = asyncio.Lock()
        self._running: dict[str, _Running] = {}  # by request id
        self._inbox: deque[tuple[int, list[EngineCoreOutput], CoreStats]] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until the model is loaded. Raises ConfigError for wrong options, EngineDeadError if the start fails."""
        self._task = asyncio.create_task(self._deliver(), name="detokenize")
        # The tokenizer is prepared while the model is loaded.
        prepared = asyncio.to_thread(self.get_tokenizer().prepare)
        await asyncio.gather(self.client.start(self._receive, self._replaced), prepared)
        self.processor.max_model_len = min(size.max_model_len for size in self.client.sizes)

    def _replaced(self, core: int) -> None:
        self._pinned.pin_again(core)
        self.metrics.count_restart(core)

    async def shutdown(self) -> None:
        """End the cores' processes. Unfinished requests are aborted."""
        self._pinned.cancel()
        await self.client.shutdown()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def max_model_len(self) -> int:
        """The context length in tokens. With max_model_len="auto", it is final only after `start`."""
        return self.processor.max_model_len

    # ---- vLLM's interface

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete a prompt. output_kind determines what is yielded and when. Leaving the loop aborts the request.

        Raises ValueError or TypeError for a wrong prompt or wrong parameters, EngineDeadError if the engine has failed.
        """
        adapter = await asyncio.to_thread(self.frontend.adapter, lora_request) if lora_request else None
        request = await self.process(request_id, prompt, sampling_params, priority, add_special_tokens, adapter)
        async with aclosing(self.run([request])) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """Pool a prompt, as LLM.encode does. Yields once. Raises ValueError or TypeError for a wrong prompt or wrong
        parameters, and for a model that only generates; EngineDeadError if the engine has failed."""
        if self.frontend.pooling is None:
            raise ValueError("this model generates; to make embeddings with it, start it with runner='pooling'")
        request = self.frontend.pooling.process(request_id, prompt, pooling_params, priority=priority)
        async with aclosing(self.run([request])) as outputs:
            async for output in outputs:
                yield pooling_request_output(output)

    async def add_lora(self, lora_request: LoRARequest) -> Adapter:
        """Load an adapter into all cores before its first request, which would otherwise load it. Raises ValueError if
        it cannot be used, BusyError if other requests used up the time for compiling its patterns."""
        adapter = await asyncio.to_thread(self.frontend.adapter, lora_request)
        assert adapter is not None
        await asyncio.gather(*(self._load(adapter, core) for core in self.client.ready))
        return adapter

    async def _load(self, adapter: Adapter, core: int) -> None:
        await self._compute("adapter", self.processor.shortest_prompt, core, adapter)

    async def _compute(self, name: str, prompt: Prompt, core: int, adapter: Adapter | None) -> None:
        """Compute a prompt on a core. Raises ValueError or BusyError if this fails."""
        params = SamplingParams(temperature=0, max_tokens=1)
        request = await self.process(f"{name}-{token_hex(8)}", prompt, params, adapter=adapter)
        async with aclosing(self.run([request], core)) as outputs:
            async for output in outputs:
                reason = output.outputs[0].finish_reason
                error = output.outputs[0].stop_reason
                if reason in ("bad_request", "overloaded", "error"):
                    raise (BusyError if reason == "overloaded" else ValueError)(error)

    def abort(self, request_id: str) -> bool:
        """End a request; its reader receives the output so far. Returns False for an unknown or finished request."""
        if request_id not in self._running:
            return False
        running = self._running[request_id]
        self._forget(self.output_processor.abort(running.request.core_requests))
        self._post([running.output])
        return True

    async def reset_prefix_cache(self, reset_external: bool = False) -> None:
        self.client.reset_prefix_cache(reset_external)
        self._pinned.pin_again(*self.client.ready)

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Stop computing until `resume_generation`. Returns when no request runs any more. New requests wait.

        mode: see Pause. wait_for_inflight_requests: vLLM's older name of mode="wait". Raises ValueError.
        """
        await self._pause(Pause("wait" if wait_for_inflight_requests else mode, clear_cache))

    async def _pause(self, pause: Pause) -> None:
        if pause.mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {pause.mode!r}")
        self.client.standing["pause"] = (Pause("keep"),)
        await self.client.carry_out(pause)

    async def resume_generation(self) -> None:
        """Raises ValueError while the engine sleeps."""
        await self.client.carry_out(Resume())
        self.client.standing.pop("pause", None)
        self._pinned.pin_again(*self.client.ready)

    async def is_paused(self) -> bool:
        return bool(self.client.stats.is_paused)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and free the memory of the KV cache and of the weights: see Sleep. Raises ValueError."""
        order = sleep(level)
        await self._pause(Pause(mode))
        await self.client.carry_out(order)
        self.client.standing["pause"] = Pause("keep"), order

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again for "weights", "kv_cache", or both (None). Requests run once both are allocated. Raises
        ValueError."""
        await self.client.carry_out(wake_up(tags))
        if not self.client.stats.is_sleeping:
            self.client.standing.pop("pause", None)
            self._pinned.pin_again(*self.client.ready)

    async def is_sleeping(self) -> bool:
        return bool(self.client.stats.is_sleeping)

    async def update_weights(self, directory: str) -> None:
        """Replace the model's weights with those in a folder. Requests wait, and then continue with the new weights.

        The cache is invalidated. Raises ValueError, without any change, if the weights do not fit the model.
        """
        read = ReadWeights(directory)
        await self._replace_weights([read], read, TakeWeights(use=True))

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        rank_offset: int = 1,
        group_name: str = WEIGHT_GROUP,
        backend: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Join a process group of `world_size` ranks. Its rank 0 is a trainer with a torch TCPStore at the master
        address. All ranks of the engine join, numbered from rank_offset on. Requests continue to run.

        backend: gloo or nccl; None for nccl on GPUs and gloo on CPUs. timeout: in seconds, for joining and for each
        tensor that is sent later. An existing group of this name is replaced. Raises ValueError.
        """
        ranks = self.config.parallel.ranks
        cores = self.client.ready
        place = master_address, master_port, world_size, rank_offset, group_name, backend, timeout
        joins = [JoinGroup(ranks * len(cores), *place, core * ranks) for core in cores]
        if len(cores) < len(self.client.sizes):
            raise ValueError("a replica is starting again; call init_weights_update_group later")
        async with self._weights_lock:
            problems = await asyncio.gather(*map(self.client.carry_out_at, cores, joins), return_exceptions=True)
            if problem := next(filter(None, problems), None):
                await self.client.carry_out(LeaveGroup(group_name))
                raise problem

    async def destroy_weights_update_group(self, group_name: str = WEIGHT_GROUP) -> None:
        """Leave a trainer's process group. Does nothing if there is none."""
        async with self._weights_lock:
            await self.client.carry_out(LeaveGroup(group_name))

    async def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = WEIGHT_GROUP,
        last: bool = True,
    ) -> None:
        """Receive tensors that rank 0 of the group broadcasts in this order: names, types and shapes as in the model's
        checkpoint. They are stored until a call with `last`; by then all must have arrived, and they replace the
        current weights.

        Raises ValueError and changes nothing. The received tensors are then dropped, and if some are missing, the
        engine leaves the group. A replica that later replaces a lost one cannot get these weights, so it pauses.
        """
        receive = ReceiveWeights(names, dtypes, shapes, group_name)
        read = [ReadWeights(f"received-{token_hex(16)}", received=True)] if last else []
        await self._replace_weights([receive, *read], *([Pause("keep")] if last else []))

    async def _replace_weights(self, steps: Sequence[ReadWeights | ReceiveWeights], *standing: Command) -> None:
        """standing: the commands for a core that later replaces a lost one; empty if more steps will follow."""
        async with self._weights_lock:
            restarts = self.client.restarts
            try:
                for step in steps:
                    await self.client.carry_out(step)
                if self.client.restarts != restarts:
                    raise ValueError("a replica was lost meanwhile; update the weights again")
            except ValueError:
                await self.client.carry_out(TakeWeights(use=False))
                raise
            if standing:
                self.client.standing.pop("weights", None)
                self.client.standing = {"weights": standing, **self.client.standing}
                await self.client.carry_out(TakeWeights(use=True))
                self._pinned.pin_again(*self.client.ready)

    async def pin_prefix(
        self, prompt: Prompt, *, add_special_tokens: bool = True, adapter: Adapter | None = None
    ) -> PinPrefix:
        """Compute a prefix of later prompts, and pin its full blocks in the cache of each core until `unpin_prefix`.
        Raises ValueError or TypeError for a wrong prompt, or if there is no room.

        It is recomputed after a cache reset, after a weight update, and by a core that replaces another.
        """
        prefix_id = f"prefix-{token_hex(8)}"
        params = SamplingParams(temperature=0, max_tokens=1)
        request = (await self.process(prefix_id, prompt, params, 0, add_special_tokens, adapter)).core_requests[0]
        prefix = PinPrefix(prefix_id, request.prompt_token_ids, request.cache_salt, adapter)
        await self._pinned.pin(prefix)
        return prefix

    async def unpin_prefix(self, prefix_id: str) -> bool:
        """Returns False for an unknown id."""
        return await self._pinned.unpin(prefix_id)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record the steps of all cores. profile_prefix: the prefix of the traces' names. Raises ValueError."""
        await profiling.start(self.client, profile_prefix)

    async def stop_profile(self) -> int:
        """Stop recording. Returns how many cores have written their traces. Raises ValueError if none has."""
        return await profiling.stop(self.client)

    async def look(self, viewer: str) -> list[bytes]:
        """Return the current activity of each core as JSON, see quire.server.page. viewer: identifies the caller.
        Raises EngineDeadError."""
        return await self.client.carry_out(Look(viewer))

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed for good."""
        self.client.check()

    @property
    def is_running(self) -> bool:
        return self.client.state is CoreState.READY

    def render_metrics(self) -> bytes:
        """Return the engine's metrics in Prometheus' text format; empty without log_stats."""
        self._report_cache_config()
        return self.metrics.render()

    def metric_families(self) -> Iterable[Metric]:
        """Return the same metrics, for a caller that adds those of other engines."""
        self._report_cache_config()
        return self.metrics.collect()

    def _report_cache_config(self) -> None:
        cache = self.config.cache
        cores = self.client.sizes
        names = "block_size enable_prefix_caching gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override"
        options = {**{name: getattr(cache, name) for name in names.split()}, "cache_dtype": cache.kv_cache_dtype}
        sizes = ({"num_gpu_blocks": s.num_blocks, "kv_cache_size_tokens": s.kv_cache_tokens} for s in cores)
        self.metrics.set_cache_config([{**options, **size} for size in sizes])

    def get_tokenizer(self) -> Tokenizer:
        return self.frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a new copy of the defaults in the model's generation_config.json."""
        return self.processor.default_sampling_params()

    # ---- for callers that run several prompts as one request, such as the server

    async def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        add_special_tokens: bool = True,
        adapter: Adapter | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenize. Raises ValueError or TypeError."""
        self.processor.check_length(prompt, params)  # before the thread, so that a rejected prompt does not wait
        arguments = (request_id, prompt, params, priority, add_special_tokens, adapter)
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        has_media = isinstance(prompt, dict) and not MEDIA_FIELDS.isdisjoint(prompt)
        if has_media or (isinstance(text, str) and len(text) > self._long_prompt):
            return await asyncio.to_thread(self.processor.process, *arguments)
        return self.processor.process(*arguments)

    async def run(
        self, requests: Sequence[ProcessedRequest], core: int | None = None, whole: list[RequestOutput] | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Run the requests together. Yields a RequestOutput whenever it has changed in a way that its output_kind
        reports.

        core: the number of the core to use; None lets the client choose one for each sequence. whole: receives the
        complete outputs, which grow while the requests run. Closing the generator aborts the unfinished requests.
        Raises ValueError if a request id is in use.
        """
        for request in requests:
            if request.request_id in self._running:
                raise ValueError(f"request id {request.request_id!r} is in use")
        self.client.check()
        mailbox = _Mailbox()
        running = {request.request_id for request in requests}
        deltas = {r.request_id: DeltaReader() for r in requests if r.params.output_kind is RequestOutputKind.DELTA}
        try:
            for request in requests:
                output = self.output_processor.add(request)
                self._running[request.request_id] = _Running(request, output, mailbox)
                if whole is not None:
                    whole.append(output)
            self.client.add([core_request for request in requests for core_request in request.core_requests], core)
            for request in requests:
                self.metrics.add(request.core_requests, self.client.core_of)
            while running:
                if not mailbox.grown:
                    mailbox.news.clear()
                    await mailbox.news.wait()
                request_id, output = next(iter(mailbox.grown.items()))
                del mailbox.grown[request_id]
                if output.finished:
                    running.discard(request_id)
                yield deltas[request_id].read(output) if request_id in deltas else output
        finally:  # an error, a disconnected client, or a caller that stopped reading
            for request in requests:
                self._forget(self.output_processor.abort(request.core_requests))
                self._running.pop(request.request_id, None)

    # ---- delivery of outputs

    def _forget(self, core_request_ids: list[str]) -> None:
        if core_request_ids:
            self.client.abort(core_request_ids)
            self.metrics.abort(core_request_ids)

    def _receive(self, core: int, outputs: list[EngineCoreOutput], stats: CoreStats) -> None:
        self._inbox.append((core, outputs, stats))
        self._arrived.set()

    async def _deliver(self) -> None:
        """Detokenize outputs, a slice at a time, so that newly arriving requests need not wait."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._inbox:
                core, outputs, stats = self._inbox.popleft()
                self.metrics.step(outputs, stats, core)
                for index, output in enumerate(outputs, 1):
                    self._take(output)
                    if index % SLICE == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)

    def _take(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        try:
            changed, to_abort = self.output_processor.process([output])
        except Exception:  # a bug: only this request ends
            logger.exception("Request %s: its output could not be processed", request_id)
            changed = self.output_processor.fail(request_id, "its output could not be processed")
            to_abort = []
            self._forget([request_id])
        if to_abort:
            self.client.abort(to_abort)
            self.metrics.stop(to_abort)
        self._post(changed)

    def _post(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                running.mailbox.grown[output.request_id] = output
                running.mailbox.news.set()
