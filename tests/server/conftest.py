"""One engine with the bundled model for all files here, and the same model in this process to compare with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.engine.llm import LLM
from support.dictation import Dictation, Parrot
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
def dictating() -> Iterator[Host]:
    """An engine that can be told what to say, and whose thinking is separated from its answers."""
    host = Host(**OPTIONS, logits_processors=[Dictation, Parrot], reasoning_parser="qwen3")
    yield host
    host.close()


@pytest.fixture(scope="session")
def speaker(dictating: Host) -> Service:
    """A model that says what vllm_xargs={"say": token ids} tells it."""
    return dictating.serve(trust_request_chat_template=True)


@pytest.fixture(scope="session")
def parrot(dictating: Host) -> Service:
    """A model that says what the last user said."""
    return dictating.serve(response_store="memory")


@pytest.fixture(scope="session")
def offline() -> LLM:
    return LLM(**OPTIONS)


@pytest.fixture
def info_is_captured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "handlers", [])  # those of a command that another test ran
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", "quire")
