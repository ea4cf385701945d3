"""Each API has its own shape of errors, for requests that never reach their route, too."""

from __future__ import annotations

import pytest

from support.server import Host, Service, eventually


@pytest.fixture(scope="module")
def guarded(host: Host) -> Service:
    return host.serve(api_key=["secret"], max_body_bytes=2000, root_path="/llm")


CASES = [  # path, headers, body, status, Anthropic's type, OpenAI's type
    ("unknown", {"x_api_key": "secret"}, {}, 404, "not_found_error", "invalid_request_error"),
    ("unknown", {}, {}, 401, "authentication_error", "authentication_error"),
    ("unknown", {"x_api_key": "secret"}, {"text": "a" * 3000}, 413, "request_too_large", "invalid_request_error"),
    ("unknown", {"x_api_key": "secret", "X_Request_Id": "ü"}, {}, 400, *["invalid_request_error"] * 2),
]


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(("path", "headers", "body", "status", "anthropic", "openai"), CASES)
def test_the_path_decides_the_shape_of_an_error(guarded, root, path, headers, body, status, anthropic, openai):
    for prefix in ("/v1/", "/v1/messages/", "/api/"):
        answer = guarded.post(f"{root}{prefix}{path}", body, **headers)
        assert answer.status == status
        if prefix == "/api/":
            assert answer.json.keys() == {"error"}
            assert isinstance(answer.json["error"], str)
        elif prefix == "/v1/messages/":
            assert answer.json.keys() == {"type", "error"}
            assert answer.json["type"] == "error"
            assert answer.json["error"].keys() == {"type", "message"}
            assert answer.json["error"]["type"] == anthropic
        else:
            assert answer.error["type"] == openai


def test_a_shape_without_a_place_for_the_field_names_it_in_the_message(guarded):
    headers = {"x_api_key": "secret", "X_Request_Id": "ü"}
    assert guarded.post("/api/x", {}, **headers).json["error"].startswith("X-Request-Id should be")
    assert guarded.post("/api/x", {}).json["error"].count("Authorization") == 1


def test_the_log_has_the_message_of_every_shape(guarded, caplog):
    for path in ("/v1/unknown", "/v1/messages/unknown", "/api/unknown"):
        guarded.post(path, {}, x_api_key="secret")
        eventually(lambda path=path: f"unknown URL: POST /llm{path}; " in caplog.text)
    assert '{"' not in caplog.text
