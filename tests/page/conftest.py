"""A server with the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import Host, Service


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host(dtype="float32", max_num_seqs=16, num_gpu_blocks_override=300)
    yield host
    host.close()


@pytest.fixture(scope="session")
def server(host: Host) -> Service:
    return host.serve()
