"""One engine with the bundled model for all files here, and the same model in this process to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.llm import LLM
from support.dictation import Parrot
from support.server import Host, Service

OPTIONS = {"dtype": "float32", "max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host(**OPTIONS)
    yield host
    host.close()


@pytest.fixture(scope="session")
def server(host: Host) -> Service:
    return host.serve()


@pytest.fixture(scope="session")
def parrot() -> Iterator[Service]:
    """A model that says what the last user said, and whose thinking is separated from its answers."""
    host = Host(dtype="float32", kv_cache_memory_bytes=64 << 20, logits_processors=[Parrot], reasoning_parser="qwen3")
    yield host.serve(response_store="memory")
    host.close()


@pytest.fixture(scope="session")
def offline() -> LLM:
    return LLM(**OPTIONS)
