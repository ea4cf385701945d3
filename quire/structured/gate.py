"""Compiles the grammars of requests in worker processes; a request waits at the gate until its grammar is ready."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.observability.logging import logger
from quire.platform.untrusted.limits import MIB, BusyError, LimitExceededError, WorkerError
from quire.structured.constraint import Constraint
from quire.structured.grammar import Backend, Matcher
from quire.structured.workers import CompiledGrammar

if TYPE_CHECKING:
    import numpy as np

CACHE_SIZE = 256  # compiled grammars, and errors of grammars that cannot be compiled
CACHE_BYTES = 256 * MIB  # of memory for compiled grammars
NUM_THREADS = 2  # threads that load compiled grammars
_QUICK = 0.002  # seconds per mask; if a batch takes longer, the masks of the next ones are timed individually
_NUM_TIMED = 64  # number of such batches


class Compiler(Protocol):
    """Compiles grammars in other processes: see GrammarCompiler."""

    def submit(self, params: StructuredOutputsParams, done: Callable[["Future[Any]"], None]) -> "Future[Any]": ...


class Loaded(NamedTuple):
    """The gate's resources for a model. eos_token_ids: the tokens that end a text."""

    backend: Backend
    compiler: Compiler
    eos_token_ids: list[int]


class _Failure(NamedTuple):
    """The reason why there is no grammar. kind: BusyError if a later attempt may succeed."""

    kind: type[ValueError] | type[BusyError]
    reason: str


class _Compilation:
    """A grammar, created by the first request for it. `source` and `error` are None until it is compiled or has
    failed."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params
        self.source: bytes | None = None
        self.grammar: Matcher | None = None  # at the beginning of a text; None if it is not loaded
        self.error: _Failure | None = None
        self.size = 0  # bytes of `grammar`
        self.job: Future[Any] | None = None
        self.waiting: set[str] = set()  # requests without a constraint so far

    @property
    def was_busy(self) -> bool:
        """Whether the waiting requests fail, and later ones try again."""
        return self.error is not None and self.error.kind is BusyError

    @property
    def is_done(self) -> bool:
        return self.source is not None or self.error is not None


class GrammarGate:
    """Lets a request pass when its grammar is compiled, and creates its constraint. load: creates the gate's resources
    for the first request with a grammar. Loading the tokenizer and the library may take seconds, which are not counted
    as compile time. Raises ValueError or ImportError if the model or the installation allows no structured outputs.
    """

    def __init__(self, load: Callable[[], Loaded]) -> None:
        self._load_all = load
        self._loaded: Loaded | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # protects the completion of a compilation
        self._cache: OrderedDict[bytes, _Compilation] = OrderedDict()  # the least recently used first
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-grammar")  # they start with the first grammar
        self._num_to_time = 0  # remaining batches of masks
        self._wake: Callable[[], None] = lambda: None

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request's grammar is compiled. Raises ValueError with the reason if it cannot be compiled, and
        BusyError if other grammars used up its time."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return True
        compilation = self._compilation(params.structured_outputs, request.request_id)
        if compilation.error is not None:
            raise compilation.error.kind(f"structured_outputs: {compilation.error.reason}")
        return compilation.source is not None

    def leave(self, request: EngineCoreRequest) -> None:
        """Forget a request that has ended in any state. A grammar that no other request waits for is not compiled
        further."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return
        key = msgspec.msgpack.encode(params.structured_outputs)
        compilation = self._cache.get(key)
        if compilation is None:
            return
        compilation.waiting.discard(request.request_id)
        if not compilation.waiting and not compilation.is_done:
            del self._cache[key]
            with self._lock:  # a job that is submitted later finds the error
                compilation.error = _Failure(ValueError, "the request has ended")
                job = compilation.job
            if job is not None:
                job.cancel()

    def constraint(self, request: EngineCoreRequest) -> Constraint | None:
        """Return the constraint of a request that has passed the gate, at the beginning of its output. None if it has
        none. If the back end raises an exception, the constraint is marked as failed, which ends the request.
        """
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return None if request.thinking is None else Constraint(None, request.thinking)
        try:
            compilation = self._cache[msgspec.msgpack.encode(params.structured_outputs)]
            compilation.waiting.discard(request.request_id)
            backend, _, eos_token_ids = self._load()
            grammar = compilation.grammar or backend.load(compilation.source or b"")  # it may have been evicted
            return Constraint(grammar.fork(), request.thinking, eos_token_ids)
        except KeyboardInterrupt:
            raise
        except BaseException as reason:  # a library's panic is no Exception
            logger.exception("The constraint of request %s could not be made", request.request_id)
            constraint = Constraint(None, request.thinking)
            constraint.fail(f"the constraint could not be made: {error_text(reason)}")
            return constraint

    # ---- masks

    def fill(self, constraints: Sequence[Constraint], bits: "np.ndarray") -> None:
        """Write one row of bits for each active constraint: the tokens that may follow. bits: int32 [constraints,
        ceil(vocab_size / 32)], contiguous. Other threads can run during the call. If the back end raises an exception
        for a constraint, only this one fails, and its row allows every token.
        """
        try:
            self._fill(constraints, bits)
        except BaseException as reason:  # a library's panic is no Exception
            if len(constraints) > 1:
                for row, constraint in enumerate(constraints):
                    self.fill([constraint], bits[row : row + 1])
                return
            logger.exception("A token mask could not be computed")
            constraints[0].fail(f"the token mask could not be computed: {error_text(reason)}")
            bits[:] = -1

    def _fill(self, constraints: Sequence[Constraint], bits: "np.ndarray") -> None:
        import numpy as np  # here, since the API process imports this module before the core has started

        rows: list[int] = []
        for row, constraint in enumerate(constraints):
            if forced := constraint.forced():
                bits[row] = 0
                bits.view(np.uint32)[row, forced[0] // 32] = 1 << forced[0] % 32
            elif constraint.matcher is not None:
                rows.append(row)
        if len(rows) == len(constraints):
            self._fill_all(constraints, bits)
        elif rows:
            filled = np.empty((len(rows), bits.shape[1]), np.int32)
            self._fill_all([constraints[row] for row in rows], filled)
            bits[rows] = filled
        for row, constraint in enumerate(constraints):
            if (token := constraint.opening_token) is not None:
                bits.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)

    def _fill_all(self, constraints: Sequence[Constraint], bits: "np.ndarray") -> None:
        """Fill the masks of constraints whose matchers are active, and charge them for the time if it is long."""
        backend = self._load().backend
        matchers = [constraint.matcher for constraint in constraints if constraint.matcher is not None]
        if not self._num_to_time:
            started = time.perf_counter()
            backend.fill(matchers, bits)
            if time.perf_counter() - started > _QUICK * len(matchers):
                self._num_to_time = _NUM_TIMED
            return
        self._num_to_time -= 1
        for row, (constraint, matcher) in enumerate(zip(constraints, matchers, strict=True)):
            started = time.thread_time()
            backend.fill([matcher], bits[row : row + 1])
            constraint.charge(time.thread_time() - started)

    # ---- compiling

    def _compilation(self, params: StructuredOutputsParams, request_id: str) -> _Compilation:
        key = msgspec.msgpack.encode(params)
        compilation = self._cache.get(key)
        if compilation is None or (compilation.was_busy and request_id not in compilation.waiting):
            self._evict()
            compilation = self._cache[key] = _Compilation(params)
            self._begin(compilation)
        compilation.waiting.add(request_id)
        self._cache.move_to_end(key)
        return compilation

    def _evict(self) -> None:
        """Make room for another grammar by evicting the least recently used ones. Sources and errors that requests
        still wait for are kept.
        """
        held = [(key, entry) for key, entry in self._cache.items() if entry.is_done]
        held = [(key, entry) for key, entry in held if entry.grammar is not None or not entry.waiting]
        excess = len(held) + 1 - CACHE_SIZE
        excess_bytes = sum(entry.size for _, entry in held) - CACHE_BYTES
        for key, entry in held:
            if excess <= 0 and excess_bytes <= 0:
                return
            excess -= 1
            excess_bytes -= entry.size
            entry.grammar = None
            entry.size = 0
            if not entry.waiting:
                del self._cache[key]

    def _begin(self, compilation: _Compilation) -> None:
        if self._loaded is None:
            self._threads.submit(self._load_and_submit, compilation)
        else:
            self._submit(compilation, self._loaded)

    def _load_and_submit(self, compilation: _Compilation) -> None:
        try:
            loaded = self._load()
        except (ValueError, ImportError) as reason:
            self._end(compilation, _bad(reason))
        except BaseException as reason:
            logger.exception("The back end of structured outputs could not be loaded")
            self._end(compilation, _bad(reason))
        else:
            self._submit(compilation, loaded)

    def _load(self) -> Loaded:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_all()
            return self._loaded

    def _submit(self, compilation: _Compilation, loaded: Loaded) -> None:
        try:
            job = loaded.compiler.submit(compilation.params, lambda job: self._compiled(compilation, job))
        except BusyError as reason:
            self._end(compilation, _busy(reason))
            return
        with self._lock:
            compilation.job = job
            is_needless = compilation.error is not None
        if is_needless:
            job.cancel()

    def _compiled(self, compilation: _Compilation, job: "Future[Any]") -> None:
        """Store the result of a compilation or its error. Called on a thread of the compiler."""
        if job.cancelled():
            return
        reason = job.exception()
        if reason is None:
            self._threads.submit(self._load_grammar, compilation, CompiledGrammar(*job.result()))
        elif isinstance(reason, LimitExceededError):
            self._end(compilation, _Failure(ValueError, f"the grammar is too complex: {reason}"))
        elif isinstance(reason, BusyError | WorkerError):
            if isinstance(reason, WorkerError):
                logger.error("A grammar could not be compiled: %s", error_text(reason))
            self._end(compilation, _busy(reason))
        else:
            self._end(compilation, _bad(reason))

    def _load_grammar(self, compilation: _Compilation, compiled: CompiledGrammar) -> None:
        try:
            grammar = self._load().backend.load(compiled.source)
        except BaseException as reason:  # a library's panic is no Exception
            if not isinstance(reason, ValueError):
                logger.exception("A grammar could not be loaded")
            self._end(compilation, _bad(reason))
            return
        with self._lock:
            if not compilation.is_done:
                compilation.grammar = grammar
                compilation.size = compiled.size
                compilation.source = compiled.source
        self._wake()

    def _end(self, compilation: _Compilation, error: _Failure) -> None:
        with self._lock:
            if not compilation.is_done:
                compilation.error = error
        self._wake()


def _bad(reason: BaseException) -> _Failure:
    return _Failure(ValueError, error_text(reason))


def _busy(reason: Exception) -> _Failure:
    return _Failure(BusyError, f"the grammar was not compiled: {error_text(reason)}")
