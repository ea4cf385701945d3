"""Checks of what the documents and the tables of options say about the engine.

A claim is a name (of reasons in quire/config/*.toml) or a sentence (of a document). Its check runs what the claim is
about on the engines of `Parts`, which all checks share, or names the tests that do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.engine.llm import LLM
from support.engines import make_llm
from support.server import Host, Service

TESTS = Path(__file__).parents[1]


class Parts:
    """Engines and servers, each of which is started when the first check needs it."""

    def __init__(self, folder: Path, checkpoint: Callable[[str], Path] | None = None) -> None:
        """checkpoint: makes the tests' checkpoint of a variant."""
        self.folder = folder
        self._checkpoint = checkpoint
        self._stack = ExitStack()

    @cached_property
    def llm(self) -> LLM:
        return LLM(dtype="float32", max_num_seqs=8, max_model_len=512, kv_cache_memory_bytes=64 << 20)

    @cached_property
    def seeing(self) -> LLM:
        return make_llm("quire-demo/vision", max_num_seqs=4, limit_mm_per_prompt={"image": 2})

    @cached_property
    def host(self) -> Host:
        host = Host(dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20)
        self._stack.callback(host.close)
        return host

    @cached_property
    def server(self) -> Service:
        return self.host.serve(trust_request_chat_template=True, response_store="memory")

    def checkpoint(self, variant: str) -> Path:
        assert self._checkpoint is not None
        return self._checkpoint(variant)

    def close(self) -> None:
        self._stack.close()


Check = Callable[[Parts], None]


def by_tests(*names: str) -> Check:
    """A check by tests of other files, such as "tests/kv/test_hashing.py::test_a_cache_salt_isolates"."""

    def run(parts: Parts) -> None:
        for name in names:
            path, _, test = name.partition("::")
            file = TESTS.parent / path
            assert file.is_file(), f"{path} does not exist"
            assert re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE), f"{path} has no test {test}"

    return run


class Checks(dict[str, Check]):
    """Checks by the names of their claims."""

    def of(self, *names: str) -> Callable[[Any], Any]:
        """Registers a function as the check of some claims."""

        def register(function: Any) -> Any:
            for name in names:
                assert name not in self, f"{name!r} has a check already"
                self[name] = function
            return function

        return register
