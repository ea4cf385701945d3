"""What large requests cost a server, and what remains of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from support.server import eventually, request
from support.server_process import Server

LONG = "The quick brown fox jumps over the lazy dog. " * 330_000  # 15 MB


@pytest.mark.slow
def test_the_memory_of_large_requests_is_given_back():
    chat = {"messages": [{"role": "user", "content": "a"}] * 50_000}
    bodies = [{"prompt": LONG}] * 6 + [{"prompt": LONG, "truncate_prompt_tokens": 9, "max_tokens": 1}, chat]
    with Server() as server, ThreadPoolExecutor(len(bodies)) as pool:
        before = psutil.Process(server.process.pid).memory_info().rss
        answers = [
            pool.submit(
                request,
                server.url,
                "POST",
                "/v1/chat/completions" if body is chat else "/v1/completions",
                json.dumps(body).encode(),
                **{"Content-Type": "application/json"},
            )
            for body in bodies
        ]
        assert [answer.result().status for answer in answers] == [400] * 6 + [200, 400]
        eventually(lambda: psutil.Process(server.process.pid).memory_info().rss < before + (100 << 20))
