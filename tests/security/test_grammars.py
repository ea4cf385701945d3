"""Constraints that would take the engine's time or memory fail alone; other clients go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.attacks import as_response_format, as_tool, attack, body, check_refused, steady_memory, witness
from support.server import Host, Service
from support.waiting import LONGEST

ONE = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
NAMES = {"type": "object", "propertyNames": {"pattern": "^(a|a)*$"}, "properties": {f"{'a' * 60}!": {"type": "string"}}}
PAIRS = {"not": {"oneOf": [True] * 4_900}}
RULES = (f'r{i}: "t{i}" r{i + 1} | "u{i}" r{i * 31 % 3000}' for i in range(3000))
CHAIN = "\n".join(["start: r0", *RULES, 'r3000: "x"'])


def one_of(number: int) -> dict[str, Any]:
    """A schema of 1,500 objects, different for each number."""
    objects = [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(1_500)]
    return {"oneOf": objects, "description": str(number), "minProperties": number}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    limits = {"cpu_seconds": 0.3, "total_seconds": LONGEST}  # less than usual, for tests that run fast, and patience
    host = Host(dtype="float32", max_num_seqs=32, kv_cache_memory_bytes=128 << 20, structured_outputs_config=limits)
    yield host
    host.close()


@pytest.fixture(scope="module")
def server(host: Host) -> Iterator[Service]:
    server = host.serve()
    usual = [body(json=ONE), body(regex="(a|b)+"), body(grammar='start: "a" | "b"'), body(json=NAMES)]
    with steady_memory(lambda: attack(server, "/v1/completions", usual)):
        yield server


@pytest.fixture(autouse=True)
def the_core_lives(host: Host) -> Iterator[None]:
    """No test may cost the engine its core."""
    pids = host.llm.client.process_ids
    yield
    assert host.llm.client.process_ids == pids
    assert host.llm.client.restarts == 0


SAMPLES = {
    "a pattern that backtracks, as a constraint": ("/v1/completions", body(json=NAMES)),
    "a pattern that backtracks, as a tool": ("/v1/chat/completions", as_tool(NAMES)),
    "a pattern that backtracks, as a response format": ("/v1/chat/completions", as_response_format(NAMES)),
    "pairs of thousands of schemas": ("/v1/completions", body(json=PAIRS)),
    "a multiple of a large number": ("/v1/completions", body(json={"type": "integer", "multipleOf": 999_983})),
    "rules in a long chain": ("/v1/completions", body(grammar=CHAIN)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_constraint_that_takes_too_much_is_refused_and_another_client_goes_on(server, name):
    path, content = SAMPLES[name]
    with witness(server):
        for answer in attack(server, path, [content] * 2):
            assert "too complex" in check_refused(answer, 400)


@pytest.mark.slow
def test_slow_schemas_delay_no_quick_one_that_was_compiled_before_or_not(server):
    assert server.post("/v1/completions", body(json=ONE)).status == 200
    with witness(server):
        slow = [body(json=one_of(number)) for number in range(8)]
        quick = [body(json=ONE), body(json={**ONE, "title": "new"}), body(choice=["a", "b"])]
        *refused, first, second, third = attack(server, "/v1/completions", [*slow, *quick])
    assert [first.status, second.status, third.status] == [200] * 3
    for answer in refused:
        check_refused(answer, 400, 503)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json": {"type": 1.5}}, "the keyword 'type' must be a type or a list of types"),
        ({"structural_tag": '{"type": "structural_tag", "format": null}'}, "format must be an object, got null"),
    ],
)
def test_wrong_types_are_named_and_nothing_is_logged_as_a_fault(server, caplog, constraint, message):
    assert message in check_refused(server.post("/v1/completions", body(**constraint)), 400)
    assert not [record for record in caplog.records if record.exc_info]


def test_top_logprobs_of_a_constrained_answer_list_no_forbidden_token(server):
    asked = {**body(choice=["yes", "no"]), "logprobs": 5}
    answer = server.post("/v1/completions", asked).json
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert tops
    assert all(value > -9999 for top in tops for value in top.values())
    assert all(len(top) < 6 for top in tops)
