"""A server that a proxy serves under a path: behind proxies that strip the path, and behind those that pass it on."""

from __future__ import annotations

import re

import pytest

from support.server import Host, Service

PREFIXES = ["", "/llm"]


@pytest.fixture(scope="module", params=["/llm", "llm/"])
def nested(host: Host, request) -> Service:
    return host.serve(root_path=request.param)


@pytest.fixture(scope="module")
def guarded(host: Host) -> Service:
    return host.serve(root_path="/llm", api_key=["secret"])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_everything_is_served_with_and_without_the_path(nested, prefix):
    assert nested.get(f"{prefix}/v1/models").json["data"][0]["id"] == "demo"
    assert nested.get(f"{prefix}/health").status == 200
    answer = nested.post(f"{prefix}/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer.json["usage"]["completion_tokens"] == 1
    assert nested.get(f"{prefix}/nowhere").error["code"] == "not_found"


def test_the_path_is_applied_once_and_whole(nested):
    for path in ("/llm/llm/v1/models", "/llmv1/models", "/other/v1/models"):
        assert nested.get(path).status == 404
    assert nested.get("/llm").headers["location"].endswith("/llm/"), "that is where the page is"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_same_paths_need_no_key(guarded, prefix):
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert guarded.get(prefix + path).status == 200
    for path in ("/v1/models", "/docs", "/openapi.json", "/load"):
        assert guarded.get(prefix + path).status == 401
    assert guarded.get(f"{prefix}/llmhealth").status == guarded.get(f"{prefix}/llm/llm/health").status == 401
    assert guarded.get(f"{prefix}/v1/models", Authorization="Bearer secret").status == 200


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_description_names_the_path_at_the_proxy(nested, prefix):
    assert nested.get(f"{prefix}/openapi.json").json["servers"] == [{"url": "/llm"}]
    page = nested.get(f"{prefix}/docs").body.decode()
    assert re.search(r"url: '(.*)'", page)[1] == "/llm/openapi.json"
    for file in re.findall(r'(?:src|href)="([^"]+)"', page):
        path = file.removeprefix(nested.url)
        assert path.startswith("/llm/")
        assert nested.get(path).status == nested.get(path.removeprefix("/llm")).status == 200
