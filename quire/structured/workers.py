"""Compiles grammars in worker processes, so that constraints with excessive time or memory use do no harm."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.platform.untrusted.limits import MIB, Limits
from quire.structured.backends import load_backend
from quire.structured.grammar import Backend, TokenTable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.platform.untrusted.pool import UntrustedPool
    from quire.structured.vocabulary import Vocabulary

CPU_LIMIT = 1.0  # seconds of processor time to compile a grammar, unless structured_outputs_config has cpu_seconds
TOTAL_LIMIT = 10.0  # seconds until it is compiled, including waiting for other grammars; or total_seconds
LOAD_LIMIT = 0.3  # seconds of processor time for loading it in the engine's process
MEMORY_LIMIT = 256 * MIB  # for compiling
SIZE_LIMIT = 64 * MIB  # of a compiled grammar in the engine's process

_SOURCE_LIMIT = 32 * MIB


class CompiledGrammar(msgspec.Struct, array_like=True):
    """source: the input of a back end's `load`. size: an upper bound on the bytes of memory that the loaded grammar
    takes."""

    source: bytes
    size: int


class GrammarCompiler:
    """Compiles grammars for one tokenizer in the worker processes of a pool."""

    def __init__(
        self,
        options: Mapping[str, Any],
        vocabulary: "Vocabulary",
        pool: "UntrustedPool",
        total_seconds: float | None = None,
    ) -> None:
        """total_seconds: replaces the default, if the options have none."""
        from hashlib import sha256  # imported here, since worker processes do not need them

        from quire.platform.untrusted.service import Preparation

        self._pool = pool
        self._options = options
        self._total_seconds = total_seconds
        table = TokenTable(
            vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids, vocabulary.bos_token_id
        )
        arguments: list[Any] = [dict(options), msgspec.msgpack.encode(table)]
        key = f"grammars {sha256(msgspec.msgpack.encode(arguments)).hexdigest()}"
        self._preparation = Preparation(key, f"{__name__}:prepare", lambda: arguments)

    def submit(self, params: StructuredOutputsParams, done: Callable[["Future[Any]"], None]) -> "Future[Any]":
        """Start to compile a grammar. done: called when the future has `CompiledGrammar`'s fields or an exception, on
        any thread. Raises BusyError."""
        cpu_seconds = self._options.get("cpu_seconds", CPU_LIMIT)
        total_seconds = self._options.get("total_seconds", self._total_seconds or TOTAL_LIMIT)
        limits = Limits(cpu_seconds, MEMORY_LIMIT, total_seconds, result_bytes=_SOURCE_LIMIT)
        data = msgspec.msgpack.encode(params)
        job = self._pool.submit(f"{__name__}:compile_grammar", data, limits=limits, preparation=self._preparation)
        job.add_done_callback(done)
        return job


# ---- in the worker processes


def prepare(options: dict[str, Any], table: bytes) -> Backend:
    tokens = msgspec.msgpack.decode(table, type=TokenTable)
    tokens(" ")  # builds the index here instead of in each job
    return load_backend(options, tokens)


def compile_grammar(backend: Backend, data: bytes) -> list[Any]:
    """Return the fields of a CompiledGrammar. Raises ValueError."""
    params = msgspec.msgpack.decode(data, type=StructuredOutputsParams)
    before = _memory()
    try:
        source = backend.source(params)
        started = time.process_time()
        loaded = backend.load(source)
        taken = time.process_time() - started
    except (ValueError, MemoryError):
        raise
    except BaseException as error:  # a library's panic is not an Exception
        raise ValueError(f"it cannot be compiled: {error_text(error)}") from error
    size = max(0, _memory() - before)
    del loaded
    if taken > LOAD_LIMIT:
        raise ValueError(f"the grammar is too complex: loading it takes more than {LOAD_LIMIT} s of processor time")
    if size > SIZE_LIMIT:
        raise ValueError(f"the grammar is too complex: it needs more than {SIZE_LIMIT // MIB} MiB of memory")
    return [source, size]


def _memory() -> int:
    """Return the bytes of this process's private memory; 0 where /proc is hidden."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:")), 0)
    except OSError:
        return 0
