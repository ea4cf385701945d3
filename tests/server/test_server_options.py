"""Options of vLLM's server: what browsers may do, what answers look like, and middleware of the user's."""

from __future__ import annotations

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.engine import ConfigError, ServerConfig
from quire.server.app import create_app
from support.server import Host, Service

PLAIN = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}


class Stamp:
    """Middleware that marks every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamped)


async def stamp(request, call_next):
    response = await call_next(request)
    response.headers["x-function"] = request.state.request_id
    return response


NO_MIDDLEWARE = 1


def test_what_browsers_may_do_is_said_in_lists(host: Host):
    options = {"allowed_origins": '["https://a.example"]', "allowed_methods": ["POST"], "allowed_headers": ["X-One"]}
    service = host.serve(**options, allow_credentials=True)
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    answer = service.request("OPTIONS", "/v1/completions", **asked)
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert "X-One" in answer.headers["access-control-allow-headers"]
    asked["Access_Control_Request_Method"] = "DELETE"
    assert service.request("OPTIONS", "/v1/completions", **asked).status == 400


def test_the_role_of_answers_can_be_another(host: Host):
    service = host.serve(response_role="narrator")
    assert service.chat("Hi", max_tokens=1)["choices"][0]["message"]["role"] == "narrator"
    assert service.chat("Hi", max_tokens=1, stream=True)[0]["choices"][0]["delta"]["role"] == "narrator"
    going_on = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 1}
    assert service.chat("Hi", **going_on)["choices"][0]["message"]["role"] == "user"


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_every_stream_can_end_with_its_usage(host: Host, server: Service, options):
    service = host.serve(enable_force_include_usage=True)
    assert "usage" not in server.complete("a", max_tokens=2, stream=True, **options)[-1]
    *chunks, last = service.complete("a", max_tokens=2, stream=True, **options)
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)
    continuous = {"stream_options": {"continuous_usage_stats": True}}
    assert all(chunk["usage"] for chunk in service.complete("a", max_tokens=2, stream=True, **continuous))


def test_logprobs_can_name_tokens_by_their_ids_unless_a_request_differs(host: Host):
    service = host.serve(return_tokens_as_token_ids=True)
    [choice] = service.complete("a", max_tokens=1, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")
    [choice] = service.complete("a", max_tokens=1, logprobs=1, return_tokens_as_token_ids=False)["choices"]
    assert not choice["logprobs"]["tokens"][0].startswith("token_id:")
    [choice] = service.chat("a", max_tokens=1, logprobs=True)["choices"]
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_middleware_of_the_user_sees_requests_and_answers(host: Host):
    service = host.serve(middleware=[f"{__name__}.Stamp", f"{__name__}:stamp"], api_key=["secret"])
    answer = service.post("/v1/completions", PLAIN, Authorization="Bearer secret")
    assert answer.status == 200
    assert answer.headers["x-stamp"] == "class"
    assert answer.headers["x-function"] == answer.headers["x-request-id"]
    assert service.post("/v1/completions", PLAIN).headers["x-stamp"] == "class"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.to_be.found", "middleware 'nowhere.to_be.found' cannot be imported: .*No module named 'nowhere'"),
        ("json.Nothing", "middleware 'json.Nothing' cannot be imported: "),
        ("Nothing", "cannot be imported"),
        (f"{__name__}.NO_MIDDLEWARE", "must be a class or a coroutine function"),
    ],
)
def test_middleware_that_is_none_is_an_error_at_start(host: Host, path, message):
    with pytest.raises(ConfigError, match=message):
        create_app(host.llm, ServerConfig.create(middleware=[path]), ["demo"])


def test_the_documents_can_be_left_out(host: Host, server: Service):
    service = host.serve(disable_fastapi_docs=True)
    for path in ("/docs", "/openapi.json"):
        assert server.get(path).status == 200
        assert service.get(path).status == 404
    assert service.post("/v1/completions", PLAIN).status == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be 0, 1 or 2, got 3"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_ca_certs"),
        ({"ssl_ca_certs": "a"}, "need ssl_certfile and ssl_keyfile"),
        ({"uvicorn_log_level": "loud"}, "uvicorn_log_level must be one of"),
        ({"allowed_origins": "[1"}, "is not valid JSON"),
    ],
)
def test_options_that_do_not_fit_together_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig.create(**options)
