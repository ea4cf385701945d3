"""Requests made from /openapi.json, right and wrong ones: no 5xx, and what is answered is what was declared.

For longer, against a `quire serve --max-generated-tokens 64`:

    st run http://127.0.0.1:8000/openapi.json --max-time 600 \\
        --exclude-checks positive_data_acceptance,negative_data_rejection
"""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from support.server import Host, Service, eventually

pytestmark = pytest.mark.slow

WITH_BODY = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/generate",
    "/api/chat",
    "/api/show",
    *("/api/embed", "/api/embeddings", "/api/pull", "/api/push", "/api/copy", "/api/create"),
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    *("/update_weights", "/init_weights_update_group", "/destroy_weights_update_group", "/v1/prefixes"),
    *("/v1/embeddings", "/v2/embed", "/v1/score", "/v1/rerank", "/classify", "/pooling"),
]
TRANSLATED = [
    f"POST {path}" for path in WITH_BODY if path.startswith(("/v1/messages", "/v1/responses", "/api/"))
]  # to chat requests
RESPONSE = "/v1/responses/{response_id}"
READ = [
    *("/v1/models", "/v1/models/{model}", RESPONSE, f"{RESPONSE}/input_items"),
    *("/health", "/ping", "/version", "/load", "/metrics"),
    *("/is_paused", "/is_sleeping", "/v1/prefixes"),
    *("/api/tags", "/api/ps", "/api/version"),
]
POST = [*WITH_BODY, f"{RESPONSE}/cancel", "/reset_prefix_cache", "/ping", "/pause", "/resume", "/sleep", "/wake_up"]
POST += ["/start_profile", "/stop_profile", "/v1/audio/transcriptions", "/v1/audio/translations"]
OPERATIONS = [*(f"POST {path}" for path in POST), *(f"GET {path}" for path in READ), f"DELETE {RESPONSE}"]
OPERATIONS += ["DELETE /v1/prefixes/{prefix_id}", "DELETE /api/delete"]
OPERATIONS += ["HEAD /api/blobs/{digest}", "POST /api/blobs/{digest}"]
CASES = [
    *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
    *((f"POST {path}", GenerationMode.NEGATIVE) for path in WITH_BODY),
]


@pytest.fixture(scope="module")
def frugal(host: Host) -> Service:
    return host.serve(max_generated_tokens=64, response_store="memory")


@pytest.fixture(scope="module")
def operations(frugal: Service):
    schema = schemathesis.openapi.from_url(f"{frugal.url}/openapi.json")
    return {operation.label: operation for operation in (found.ok() for found in schema.get_all_operations())}


def test_the_schema_has_every_endpoint(operations):
    assert operations.keys() == set(OPERATIONS)


@pytest.mark.sampled(37)
@pytest.mark.parametrize(("label", "mode"), CASES, ids=[f"{mode.value}-{label}" for label, mode in CASES])
def test_requests_made_from_the_schema_are_answered_as_declared(operations, host: Host, label, mode):
    operation = operations[label]
    examples = 10 if not operation.body else 20 if label in TRANSLATED else 120

    # A right request may ask for what this model does not have, such as a token id. A request that the schema calls
    # wrong may be right, since "5" is taken for 5 as in vLLM; test_malformed.py has what is refused.
    excluded = [schemathesis.checks.positive_data_acceptance, schemathesis.checks.negative_data_rejection]

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(excluded_checks=excluded)

    check()
    eventually(lambda: host.is_idle)  # responses may be generated in the background
