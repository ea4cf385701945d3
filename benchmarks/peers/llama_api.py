"""A small common interface for llama.cpp (package llama-cpp-python) and ik_llama.cpp (ik-llama-cpp-python), whichever
is installed.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version

import numpy as np

try:
    import llama_cpp as lc

    NAME = "llama.cpp"
    VERSION = lc.__version__
except ImportError:
    from ik_llama_cpp import _ctypes_api as lc

    NAME, VERSION = "ik_llama.cpp", version("ik-llama-cpp-python")

BATCH = 2048
_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = _log_callback(lambda level, text, user_data: None)  # must exist as long as the library uses it
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are needed


class Context:
    """A model with memory for the keys and values of `tokens` tokens, in up to `sequences` sequences."""

    def __init__(self, path: str, tokens: int, sequences: int, threads: int) -> None:
        self.is_ik = NAME == "ik_llama.cpp"
        library = lc._lib if self.is_ik else lc.llama_cpp._lib
        library.llama_log_set(_quiet, ctypes.c_void_p(0))
        self._remove = library.llama_kv_cache_seq_rm if self.is_ik else None
        if self._remove is not None:
            self._remove.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
            self._remove.restype = ctypes.c_bool
        library.llama_print_system_info.restype = ctypes.c_char_p
        self.system_info = library.llama_print_system_info().decode()
        lc.llama_backend_init()
        self._model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        if not self._model:
            raise ValueError(f"{NAME} cannot load {path}")
        params = lc.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = BATCH
        params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        if not self.is_ik:
            params.kv_unified = True
        self._context = lc.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"{NAME} cannot make a context of {tokens} tokens")
        self.vocab_size: int = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self._model))
        self._batch = lc.llama_batch_init(BATCH, 0, sequences)

    def decode(self, rows: list[Row]) -> list[np.ndarray]:
        """Return the logits of the requested rows, as views that are valid until the next call."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for j, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[j] = token
            batch.pos[j] = position
            batch.logits[j] = wanted
            batch.n_seq_id[j] = 1
            batch.seq_id[j][0] = sequence
        if status := lc.llama_decode(self._context, batch):
            raise RuntimeError(f"{NAME}: llama_decode returned {status}")
        return [
            np.ctypeslib.as_array(lc.llama_get_logits_ith(self._context, j), shape=(self.vocab_size,))
            for j, row in enumerate(rows)
            if row[3]
        ]

    def keep(self, sequence: int, tokens: int) -> None:
        """Drop a sequence's keys and values after its first `tokens` tokens."""
        if self._remove is not None:
            done = self._remove(self._context, sequence, tokens, -1)
        else:
            done = lc.llama_memory_seq_rm(lc.llama_get_memory(self._context), sequence, tokens, -1)
        if not done:
            raise RuntimeError(f"{NAME} cannot drop a part of sequence {sequence}")
