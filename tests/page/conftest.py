"""A server with the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.pages import chromium, visit
from support.server import Host, Service


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host(dtype="float32", max_num_seqs=16, num_gpu_blocks_override=300)
    yield host
    host.close()


@pytest.fixture(scope="session")
def server(host: Host) -> Service:
    return host.serve()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: Service) -> Iterator[Any]:
    with visit(browser, server) as page:
        yield page
