"""Calls transformers, whose code needs torch: in this process if it has torch, otherwise as jobs in processes that a
second launcher forks, with limits. So an API process never imports torch."""

import sys
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pkgutil import resolve_name
from threading import Lock
from typing import Any

import msgspec

from quire.platform.untrusted.limits import MIB, Limits
from quire.platform.untrusted.pool import UntrustedPool
from quire.platform.untrusted.service import Preparation

_CODE = "quire.models.transformers_backend"
_LIMITS = Limits(20.0, 3072 * MIB, 300.0, slice_seconds=1.0, result_bytes=400 * MIB)
_IDLE_SECONDS = 3600.0  # importing transformers takes seconds
_lock = Lock()


@cache
def _pool() -> UntrustedPool:
    return UntrustedPool(idle_seconds=_IDLE_SECONDS)


def call(function: str, *arguments: Any) -> Any:
    """Call "module:function" of the transformers back end with plain data. Raises ValueError."""
    if "torch" in sys.modules:
        return resolve_name(f"{_CODE}.{function}")(*arguments)
    return _pool().run(f"{_CODE}.{function}", *arguments, limits=_LIMITS)


class Prepared:
    """A value that "module:function" of the back end makes once, and to which further calls are passed."""

    def __init__(self, function: str, arguments: Sequence[Any]) -> None:
        self._arguments = arguments
        self._value: Any = None
        self._function = f"{_CODE}.{function}"
        self._is_here = "torch" in sys.modules
        key = sha256(msgspec.json.encode([function, arguments])).hexdigest()
        self._preparation = Preparation(key, self._function, lambda: arguments)

    def call(self, function: str, *arguments: Any) -> Any:
        """Raises ValueError, BusyError or WorkerError."""
        if not self._is_here:
            name = f"{_CODE}.{function}"
            return _pool().run(name, *arguments, limits=_LIMITS, preparation=self._preparation)
        with _lock:  # processors of transformers are not made for several threads
            if self._value is None:
                self._value = resolve_name(self._function)(*self._arguments)
            return resolve_name(f"{_CODE}.{function}")(self._value, *arguments)
