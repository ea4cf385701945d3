"""Compiles the grammars of requests on threads of its own; a request waits at the gate until its grammar is ready."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.metrics.logging import logger
from quire_structured.constraint import Constraint
from quire_structured.grammar import Backend, Matcher

if TYPE_CHECKING:
    import numpy as np

TIME_LIMIT = 0.8  # seconds for a grammar, so that a client has its 400 within a second
CACHE_SIZE = 256  # compiled grammars, and reasons why a grammar cannot be compiled
NUM_THREADS = 2  # that compile at the same time
MAX_THREADS = 8  # including those that are busy with a grammar whose time is over


class _Compilation:
    """A grammar, from the first request for it. `grammar` and `error` are None until it is compiled or has failed."""

    def __init__(self, params: StructuredOutputsParams) -> None:
        self.params = params
        self.grammar: Matcher | None = None  # at the beginning of a text
        self.error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.grammar is not None or self.error is not None


class GrammarGate:
    """Lets a request pass when its grammar is compiled, and gives it its constraint.

    load_backend: makes the back end and the tokens that end a text, at the first
    request that needs them. It may take seconds, for the tokenizer and the library, which do not count as the time of a
    grammar. Raises ValueError or ImportError if the model or the installation allows no structured outputs.
    """

    def __init__(self, load_backend: Callable[[], tuple[Backend, list[int]]]) -> None:
        self._load_backend = load_backend
        self._loaded: tuple[Backend, list[int]] | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # for the number of threads, and for marking a compilation as done
        self._cache: OrderedDict[bytes, _Compilation] = OrderedDict()  # the least recently used first
        self._waiting: SimpleQueue[_Compilation] = SimpleQueue()
        self._num_threads = 0
        self._wake: Callable[[], None] = lambda: None

    def connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        """Whether the request's grammar is compiled. Raises ValueError with the reason if it cannot be."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return True
        compilation = self._compilation(params.structured_outputs)
        if compilation.error is not None:
            raise ValueError(f"structured_outputs: {compilation.error}")
        return compilation.grammar is not None

    def constraint(self, request: EngineCoreRequest) -> Constraint | None:
        """The constraint of a request that has passed the gate, at the beginning of its output. None if it has none.

        If the back end raises an exception, the constraint has failed, which ends the request.
        """
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return None if request.thinking is None else Constraint(None, request.thinking)
        try:
            backend, eos_token_ids = self._load()
            # It may have left the cache in the meantime.
            grammar = self._compilation(params.structured_outputs).grammar or backend.compile(params.structured_outputs)
            return Constraint(grammar.fork(), request.thinking, eos_token_ids)
        except KeyboardInterrupt:
            raise
        except BaseException as reason:  # a library's panic is no Exception
            logger.exception("The constraint of request %s could not be made", request.request_id)
            constraint = Constraint(None, request.thinking)
            constraint.fail(f"the constraint could not be made: {error_text(reason)}")
            return constraint

    def fill(self, constraints: Sequence[Constraint], bits: "np.ndarray") -> None:
        """Write which tokens may follow, for each active constraint one row of bits.

        bits: int32 [constraints, ceil(vocab_size / 32)], contiguous. Other threads run meanwhile. A constraint for
        which the back end raises an exception fails alone, and its row allows every token.
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

        matchers: list[Matcher] = []
        rows: list[int] = []
        for row, constraint in enumerate(constraints):
            if forced := constraint.forced():
                bits[row] = 0
                bits.view(np.uint32)[row, forced[0] // 32] = 1 << forced[0] % 32
            elif constraint.matcher is not None:
                matchers.append(constraint.matcher)
                rows.append(row)
        if len(rows) == len(constraints):
            self._load()[0].fill(matchers, bits)
        elif rows:
            filled = np.empty((len(rows), bits.shape[1]), np.int32)
            self._load()[0].fill(matchers, filled)
            bits[rows] = filled
        for row, constraint in enumerate(constraints):
            if (token := constraint.opening_token) is not None:
                bits.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)

    def _compilation(self, params: StructuredOutputsParams) -> _Compilation:
        key = msgspec.msgpack.encode(params)
        compilation = self._cache.get(key)
        if compilation is None:
            compilation = self._cache[key] = _Compilation(params)
            self._waiting.put(compilation)
            with self._lock:
                self._start_thread(NUM_THREADS)
        self._cache.move_to_end(key)
        if len(self._cache) > CACHE_SIZE:
            oldest = next((key for key, entry in self._cache.items() if entry.is_done), None)
            if oldest is not None and oldest != key:
                del self._cache[oldest]
        return compilation

    def _start_thread(self, limit: int) -> None:
        """Start a thread that compiles, unless there are `limit` threads already. The caller holds the lock."""
        if self._num_threads < limit:
            self._num_threads += 1
            threading.Thread(target=self._compile_all, name="quire-grammar", daemon=True).start()

    def _load(self) -> tuple[Backend, list[int]]:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_backend()
            return self._loaded

    def _compile_all(self) -> None:
        """What a thread does: compile the grammars in the queue. It ends if another one has taken its place."""
        while True:
            compilation = self._waiting.get()
            timer = threading.Timer(TIME_LIMIT, self._give_up, [compilation])
            timer.daemon = True
            grammar, error = None, None
            try:
                backend, _ = self._load()
                timer.start()
                grammar = backend.compile(compilation.params)
            except (ValueError, ImportError) as reason:
                error = error_text(reason)
            except BaseException as reason:  # a library's panic is no Exception
                logger.exception("A grammar could not be compiled")
                error = f"the grammar could not be compiled: {error_text(reason)}"
            timer.cancel()
            with self._lock:
                is_late = compilation.is_done
                if not is_late:
                    compilation.grammar, compilation.error = grammar, error
                elif self._num_threads > NUM_THREADS:
                    self._num_threads -= 1
                    return
            if not is_late:
                self._wake()

    def _give_up(self, compilation: _Compilation) -> None:
        """Fail a grammar that takes too long. Its thread cannot be stopped; another one goes on with the queue."""
        with self._lock:
            if compilation.is_done:
                return
            compilation.error = f"the grammar is too complex: it was not compiled within {TIME_LIMIT} s"
            self._start_thread(MAX_THREADS)
        self._wake()
