"""A device that works as late as possible: operations run only when their results are demanded.

A GPU runs behind the host. This device runs as far behind as it can. Every operation of a step is queued, and its
result holds rubbish until it runs. A host that needs to know a property of a result, such as its number of nonzero
elements, gets an error. A host that reads the result, or changes memory that is yet to be read, computes rubbish and
fails the test. A host that asks for the results of a step although it could have submitted another one gets an error as
well, since it would have left the device idle.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.attention.by_head import EndingText
from quire.engine.assemble import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.executor.base import Executor
from quire.kv.specs import KVCacheSize
from quire.layers.forward_state import ForwardState
from quire.layers.step_inputs import Array
from quire.layers.step_media import StepMedia
from quire.lora.gate import AdapterGate
from quire.messages.changes import Change, TrainerOrder
from quire.messages.engine import EngineCoreOutput
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.messages.transfers import Transfer
from quire.models.model import MediaEncoder
from quire.models.towers.text import Encoder as TextEncoder
from quire.models.towers.whisper import Encoder as SoundEncoder
from quire.sampling.sampler import Sampler
from quire.scheduler.compression import Compression
from quire.scheduler.encoding import EncoderCache
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.structured.gate import GrammarGate
from quire.worker.compression import CompressedRows, CompressingForward, CompressingStaging
from quire.worker.device import Device, layout, pack, unpack
from quire.worker.drafters.drafter import Drafter, NoDrafter
from quire.worker.drafters.heads import ChainDrafter, HeadLayers, StateDrafter
from quire.worker.drafters.model import ModelDrafter
from quire.worker.forward import Forward, ForwardParts
from quire.worker.graphs import CapturedForward
from quire.worker.input_batch import InputBatch
from quire.worker.media import MediaInputs, NoMedia
from quire.worker.model_runner import ModelRunner
from quire.worker.runner import RunnerParts
from quire.worker.staging import Staging


class Stream(TorchDispatchMode):
    """A queue of torch operations: while it is entered, they are queued. It can be entered repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], object]] = deque()
        self.running = False
        self.waits = 0  # how often the host waited for a queued operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Operations within this block run at once instead of being queued."""
        before, self.running = self.running, True
        try:
            yield
        finally:
            self.running = before

    def launch(self, run: Callable[[], Tensor], *shape: int, dtype: torch.dtype) -> Tensor:
        """Queue `run`. Returns the tensor that will hold its result."""
        with self.at_once():
            out = spoilt(torch.empty(shape, dtype=dtype))
        self.queue.append(lambda: out.copy_(run()))
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.running or not (tensors := _tensors([args, kwargs])):
            return func(*args, **kwargs)  # creating a tensor reads nothing
        may_be_view, written = _results(func)
        if may_be_view:
            made = func(*args, **kwargs)
            theirs = {x.untyped_storage().data_ptr() for x in tensors}
            if all(x.untyped_storage().data_ptr() in theirs for x in _tensors(made)):
                return made  # nor does a view; but `to` and `reshape` may have made a copy
        elif written:
            self.queue.append(lambda: func(*args, **kwargs))
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            out = [named[name] for name in written]
            return out[0] if len(out) == 1 else tuple(out)
        try:
            there = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
            like = func(*_map(_to_meta, args), **_map(_to_meta, there))
        except (NotImplementedError, RuntimeError) as error:
            raise AssertionError(f"the host waits for the device: {func} ({error})") from error
        outs = _map(lambda t: spoilt(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)), like)

        def run() -> None:
            made = func(*args, **kwargs)
            for out, result in zip(_tensors(outs), _tensors(made), strict=True):
                out.copy_(result)

        self.queue.append(run)
        return outs

    def run_until(self, position: Callable[[], object]) -> None:
        """Run the queue up to the operation `position`, for which the host waits."""
        self.waits += 1
        with self.at_once(), torch.inference_mode():
            while True:
                run = self.queue.popleft()
                run()
                if run is position:
                    return


@cache
def _results(func: Any) -> tuple[bool, list[str]]:
    """Of an operation: whether a result may be a view of an argument, and the arguments that are its results."""
    returns = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    may_be_view = any(not alias.is_write for alias in returns)
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return may_be_view, written if returns else []


def _map(change: Callable[[Tensor], Any], x: Any) -> Any:
    """Change the tensors in arguments or results. torch's own tree_map does that in ten times the time."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (list, tuple)):
        return type(x)([_map(change, item) for item in x])
    return {name: _map(change, item) for name, item in x.items()} if isinstance(x, dict) else x


def _tensors(x: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, x)
    return found


def _to_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def spoilt(x: Tensor) -> Tensor:
    """The tensor, filled with rubbish."""
    return x.fill_(float("nan") if x.is_floating_point() else True if x.dtype is torch.bool else -128)


class LateDevice(Device):
    is_async = True

    def __init__(self, stream: Stream) -> None:
        super().__init__(torch.device("cpu"))
        self.stream = stream
        self.waits = 0  # how often the host waited for the memory of an earlier upload
        # Two steps, and the next; and what copies the bytes of each.
        self._buffers = deque((torch.empty(1 << 22, dtype=torch.uint8), lambda: None) for _ in range(3))

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        ends = layout(arrays)
        size = max(ends.values())
        memory, copied = self._buffers.popleft()
        if copied in self.stream.queue:
            self.waits += 1
            self.stream.run_until(copied)
        here = memory[:size]
        pack(arrays, ends, here.numpy())
        there = self.stream.launch(lambda: here, size, dtype=torch.uint8)
        self._buffers.append((memory, self.stream.queue[-1]))
        return unpack(arrays, ends, there)

    def download(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        here = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]

        def copy() -> None:
            for target, source in zip(here, tensors, strict=True):
                target.copy_(source)

        self.stream.queue.append(copy)

        def read() -> list[Tensor]:
            if copy in self.stream.queue:
                self.stream.run_until(copy)
            return here

        return read

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        run()
        queue, self.stream.queue = self.stream.queue, deque()
        result = run()
        captured, self.stream.queue = self.stream.queue, queue
        return result, lambda: self.stream.queue.extend(captured)


class _Late:
    """A wrapper that launches the methods of the real object."""

    def __init__(self, real: Any, stream: Stream) -> None:
        self.real, self.stream = real, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class LateModel(_Late):
    def embed(self, ids: Tensor, *others: Any) -> Tensor:
        return self._embedded(lambda: self.real.embed(ids, *others), len(ids))

    def embed_with(self, media: StepMedia, ids: Tensor, *others: Any) -> Tensor:
        return self._embedded(lambda: self.real.embed_with(media, ids, *others), len(ids))

    def _embedded(self, run: Callable[[], Tensor], count: int) -> Tensor:
        return self.stream.launch(run, count, self.real.input_size, dtype=self.real.kernels.target.dtype)

    def forward(self, x: Tensor, state: ForwardState, rows: Tensor | None = None, taps: Any = None) -> Tensor:
        def run() -> Tensor:
            return self.real.forward(x.clone(), replace(state, plans=[plan() for plan in state.plans]), rows, taps)

        size = self.real.hidden_size
        return self.stream.launch(run, len(x if rows is None else rows), size, dtype=x.dtype)

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        size = self.real.vocab_size
        return self.stream.launch(lambda: self.real.logits(hidden, slots), len(hidden), size, dtype=hidden.dtype)

    def late_tower(self, real: Any) -> Any:
        """Encoders of pictures are operations of torch; those of texts and sounds, which take adapters, are kernels."""
        if not isinstance(real, TextEncoder | SoundEncoder):
            return real
        size, dtype = self.real.hidden_size, self.real.kernels.target.dtype

        def encode(modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
            count = len(tensors["ids"] if isinstance(real, TextEncoder) else real.positions)
            return self.stream.launch(lambda: real(modality, tensors), count, size, dtype=dtype)

        return encode

    def store_encoded(self, *arguments: Any) -> None:
        """Fills blocks of the cache."""
        self.stream.queue.append(lambda: self.real.store_encoded(*arguments))


class LateHeadLayers(_Late):
    """The layers of a head. What surrounds them are operations of torch, if the head has the kernels "reference"."""

    def forward(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Any = None) -> Tensor:
        def run() -> Tensor:
            return self.real.forward(x.clone(), replace(state, plans=[plan() for plan in state.plans]), wanted)

        size = self.real.head.spec.hidden_size
        return self.stream.launch(run, len(x if wanted is None else wanted), size, dtype=x.dtype)


class LateBackend(_Late):
    def plan(self, layout: Any, over: Any = None) -> Callable[[], Any]:
        return lambda: self.real.plan(layout)


class LateRows(CompressedRows):
    def evict(self, text: EndingText, full: int, is_first: bool) -> None:
        self.device.stream.queue.append(lambda: super(LateRows, self).evict(text, full, is_first))


class LateKernels(_Late):
    def argmax(self, logits: Tensor) -> Tensor:
        return self.stream.launch(lambda: self.real.argmax(logits), len(logits), dtype=torch.int64)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return self.stream.launch(lambda: self.real.log_softmax(logits), *logits.shape, dtype=torch.float32)

    def sample_gumbel(self, logits: Tensor, *arguments: Any) -> Tensor:
        return self.stream.launch(lambda: self.real.sample_gumbel(logits, *arguments), len(logits), dtype=torch.int64)

    def keep_top_k_top_p(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        def run() -> Tensor:
            return self.real.keep_top_k_top_p(logits, top_k, top_p)

        return self.stream.launch(run, *logits.shape, dtype=logits.dtype)

    def count_kept(self, *arguments: Any) -> Tensor:
        return self.stream.launch(lambda: self.real.count_kept(*arguments), len(arguments[-1]) - 1, dtype=torch.int64)

    def accept_or_resample(self, *arguments: Any) -> Tensor:
        return self.stream.launch(
            lambda: self.real.accept_or_resample(*arguments), len(arguments[0]), dtype=torch.int64
        )

    def flat_batch(self, *arguments: Any) -> None:
        """Fills memory that the caller provides."""
        self.stream.queue.append(lambda: self.real.flat_batch(*arguments))

    def apply_token_masks(self, *arguments: Any) -> None:
        self.stream.queue.append(lambda: self.real.apply_token_masks(*arguments))


class WatchedScheduler(Scheduler):
    """Knows whether it could schedule another step. It cannot if the last step was empty and nothing happened since."""

    exhausted = False

    def schedule(self) -> SchedulerOutput:
        step = super().schedule()
        self.exhausted = not step.rows
        return step

    def update(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        self.exhausted = False
        return super().update(output)


class LateResult(Future[ModelRunnerOutput]):
    def __init__(self, executor: LateExecutor, step_id: int, read: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._executor, self._step_id, self._read = executor, step_id, read

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self._executor.may_be_read(self._step_id)
            self.set_result(self._read())
        return super().result(timeout)


class LateExecutor(Executor):
    """Runs a real ModelRunner over the model and the cache of another one."""

    def __init__(self, llm: LLM, scheduler: WatchedScheduler, captured: bool = False) -> None:
        real = llm.core.executor.runner
        self.kv_cache: KVCacheSize = llm.core.executor.kv_cache
        self.scheduler, self.stream = scheduler, Stream()
        self.most_in_flight = 0
        self.waits = 0  # how often the host waited for the device while launching a step
        self._unread: deque[int] = deque()  # submitted steps whose results the host has not asked for
        old, device = real.batch, LateDevice(self.stream)
        batch = InputBatch(
            len(old.num_tokens),
            old.max_model_len,
            old.block_size,
            old.kv_specs,
            old.vocab_size,
            old.takes_adapters,
            old.has_sections,
        )
        self.real_model = getattr(real.model, "real", real.model)
        old_executor = llm.core.executor
        self.encoder: MediaEncoder = (
            old_executor.encoder if isinstance(old_executor, LateExecutor) else old_executor._worker.loaded.encoder
        )
        model: Any = LateModel(self.real_model, self.stream)
        backends: Any = [
            LateBackend(getattr(backend, "real", backend), self.stream) for backend in real.forward.backends
        ]
        kernels: Any = LateKernels(model.kernels, self.stream)
        most_tokens = scheduler.limits.max_num_batched_tokens
        self.most_tokens = max(most_tokens, len(batch.num_tokens))
        staging = Staging(device, batch, kernels, self.most_tokens)
        compression = llm.config.cache.compression
        if compression is not None:
            layers = len(self.real_model.kv_specs[0].entries)
            make_rows = partial(LateRows, compression, batch, device, backends[0], layers)
            staging = CompressingStaging(device, batch, kernels, self.most_tokens, make_rows)
        sampler = Sampler(kernels, llm.config, device.torch_device, self.encoder.output_rules)
        drafter = self.late_drafter(real.drafter, staging, sampler)
        parts = ForwardParts(taps=drafter.taps)
        forward = Forward(model, backends, parts)
        if isinstance(staging, CompressingStaging):
            forward = CompressingForward(model, backends, staging.rows)
        if captured:
            drafts = llm.config.scheduler.speculation.num_speculative_tokens if llm.config.scheduler.speculation else 0
            options = llm.config.kernels
            forward = CapturedForward(model, backends, staging, most_tokens, 1 + drafts, parts=parts, options=options)
            with self.stream:
                forward.capture()
            if self.stream.queue:
                self.stream.run_until(self.stream.queue[-1])
        media = NoMedia()
        if isinstance(real.media, MediaInputs):
            media = MediaInputs(model, MediaEncoder(model.late_tower(self.encoder.tower), self.encoder.levels), batch)
        drafts_stay = scheduler.limits.depth > 1
        runner_parts = RunnerParts(model, batch, staging, forward, media)
        self.runner = ModelRunner(runner_parts, sampler, drafter, drafts_stay)

    def late_drafter(self, drafter: Drafter, staging: Staging, sampler: Sampler) -> Drafter:
        """A drafter of the same kind over the same weights and the same cache."""
        if isinstance(drafter, NoDrafter):
            return drafter
        if isinstance(drafter, StateDrafter):
            return StateDrafter(drafter.head, staging, sampler)
        assert isinstance(drafter, (ChainDrafter, ModelDrafter))
        backends: Any = [LateBackend(backend, self.stream) for backend in drafter.forward.backends]
        if isinstance(drafter, ChainDrafter):
            layers: Any = LateHeadLayers(HeadLayers(drafter.head), self.stream)
            forward, spec = Forward(layers, backends), self.real_model.spec
            return ChainDrafter(
                drafter.head,
                forward,
                forward,
                staging,
                sampler,
                self.most_tokens,
                spec.hidden_size,
                self.real_model.kernels.target.dtype,
            )
        model: Any = LateModel(drafter.model, self.stream)
        return ModelDrafter(model, Forward(model, backends), staging, sampler, drafter.most_tokens, drafter.mask)

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        before = self.stream.waits
        with self.stream:
            yield
        self.waits += self.stream.waits - before

    def submit(self, step: SchedulerOutput) -> None:
        with self.launching():
            self.runner.submit(step)
        self._unread.append(step.step_id)
        self.most_in_flight = max(self.most_in_flight, len(self._unread))

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> LateResult:
        with self.launching():
            read = self.runner.sample(step_id, masks)
        return LateResult(self, step_id, read)

    def load_adapter(self, key: str, path: str) -> Future[None]:
        loaded: Future[None] = Future()
        try:
            loaded.set_result(self.runner.adapters.load(key, path))
        except ValueError as error:
            loaded.set_exception(error)
        return loaded

    def change(self, change: Change) -> None:
        raise AssertionError("no test changes the memory of these ranks")

    def exchange(self, order: TrainerOrder) -> Any:
        raise AssertionError("no trainer sends these ranks anything")

    def drop_adapter(self, key: str) -> None:
        self.runner.adapters.drop(key)

    def transfer(self, order: Transfer) -> Future[list[int]]:
        raise ValueError("there are no tiers here")

    def may_be_read(self, step_id: int) -> None:
        depth = self.scheduler.limits.depth
        if len(self._unread) < depth and not self.scheduler.exhausted:
            raise AssertionError(
                f"the result of step {step_id} was read with {len(self._unread)} of {depth} steps in flight"
            )
        assert self._unread.popleft() == step_id, "results are read in order"

    def check(self) -> None:
        """Faults are raised by the other methods."""

    def shutdown(self) -> None:
        """There is nothing to shut down."""


def limits_of(llm: LLM, depth: int) -> SchedulerLimits:
    return replace(scheduler_limits(llm.config, llm.max_model_len), depth=depth)


class LateMemory:
    """The memory for adapters of an executor that is made later."""

    executor: LateExecutor

    def load_adapter(self, key: str, path: str) -> Future[None]:
        return self.executor.load_adapter(key, path)

    def drop_adapter(self, key: str) -> None:
        self.executor.drop_adapter(key)


def watched_scheduler(
    llm: LLM, depth: int, grammars: GrammarGate | None = None, adapters: AdapterGate | None = None
) -> WatchedScheduler:
    kv, cache = llm.core.executor.kv_cache, llm.config.cache
    speculation = llm.core.scheduler.speculation
    if isinstance(speculation, Speculation) and speculation.proposer is None:
        speculation.drafts_stay = depth > 1
    return WatchedScheduler(
        limits_of(llm, depth),
        kv.num_blocks,
        list(kv.specs),
        cache.block_size,
        cache.enable_prefix_caching,
        grammars=grammars,
        vocab_size=llm.core.executor.runner.batch.vocab_size,
        speculation=speculation,
        adapters=adapters,
        compression=None if cache.compression is None else Compression(cache.compression, cache.block_size),
        encoders=EncoderCache(llm.core.scheduler.encoders.limits),
    )


def run_late(llm: LLM, depth: int = 2, captured: bool = False, grammars: GrammarGate | None = None) -> LateExecutor:
    """Give `llm` a new core over the same model, with `depth` steps in flight on a late device."""
    memory, lora = LateMemory(), llm.config.lora
    adapters = AdapterGate(memory, lora.max_loras, lora.num_in_memory) if lora.enable_lora else None
    scheduler = watched_scheduler(llm, depth, grammars, adapters)
    memory.executor = executor = LateExecutor(llm, scheduler, captured)
    llm.core = EngineCore(scheduler, executor)
    return executor
