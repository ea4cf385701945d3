"""Web pages of other origins cannot send requests; the server's own page, allowed origins and other clients can."""

from __future__ import annotations

import json

import pytest

from support.server import Host, Service

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "stream": False, "options": {"num_predict": 1}},
}
# What browsers send with a form or a fetch of another origin's page.
FOREIGN = {
    "a form": {"Origin": "https://evil.example", "Content_Type": "text/plain", "Sec_Fetch_Site": "cross-site"},
    "an old browser": {"Origin": "https://evil.example", "Content_Type": "application/x-www-form-urlencoded"},
    "a file": {"Origin": "null", "Sec_Fetch_Site": "cross-site"},
    "a sandbox": {"Origin": "null"},
    "another port": {"Origin": "http://127.0.0.1:1", "Sec_Fetch_Site": "same-site"},
    "an extension": {"Origin": "chrome-extension://abc"},
    "no origin": {"Sec_Fetch_Site": "cross-site"},
    "bytes": {"Origin": "https://evil.example:99999:1"},
}


def post(server: Service, path: str = "/v1/completions", **headers: str):
    return server.request("POST", path, json.dumps(BODIES[path]).encode(), **headers)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_page_of_another_origin_is_refused(server, name):
    answer = post(server, **FOREIGN[name])
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert "--allowed-origins" in answer.error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_every_api_refuses_foreign_pages_and_answers_clients_without_a_content_type(server, path):
    refused = post(server, path, **FOREIGN["a form"])
    assert refused.status == 403
    assert b"--allowed-origins" in refused.body
    assert post(server, path).status == 200
    assert post(server, path, Content_Type="application/x-www-form-urlencoded").status == 200


def test_routes_without_a_body_are_guarded_as_well(server):
    assert server.request("POST", "/reset_prefix_cache", **FOREIGN["a form"]).status == 403
    assert server.get("/v1/models", **FOREIGN["a form"]).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "same-origin", "Origin": "https://behind-a-proxy.example"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": "http://llm.example:8000", "Host": "llm.example:8000"},
        {"Origin": "https://llm.example", "Host": "LLM.example"},
        {"Origin": "http://llm.example", "Host": "llm.example:80"},
        {"Origin": "https://llm.example", "Host": "10.0.0.1:8000", "X_Forwarded_Host": "llm.example"},
    ],
)
def test_the_servers_own_page_may_call(server, headers):
    assert post(server, **headers).status == 200


def test_pages_of_allowed_origins_may_send_any_content_type(host: Host):
    some, all_pages = host.serve(allowed_origins=["https://chat.example"]), host.serve(allowed_origins=["*"])
    allowed = {"Origin": "https://chat.example", "Sec_Fetch_Site": "cross-site", "Content_Type": "text/plain"}
    assert post(some, **allowed).status == 200
    assert post(some, **FOREIGN["a form"]).status == 403
    for headers in FOREIGN.values():
        assert post(all_pages, **headers).status == 200
