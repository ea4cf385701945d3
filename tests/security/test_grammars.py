"""Constraints that would take the engine's time or memory fail alone; other clients go on."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

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


# ---- generated variants

WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=3)
PATTERNS = st.recursive(
    WORDS | st.sampled_from([".", r"\w", r"\d", "[a-f]", r"\s", "(a|a)", "(a|ab|abc)"]),
    lambda part: st.one_of(
        st.builds("({}){}".format, part, st.sampled_from(["*", "+", "?", "{3}", "{1,50}", "{0,999}", "{200}"])),
        st.builds("({}|{})".format, part, part),
        st.builds("{}{}".format, part, part),
    ),
    max_leaves=12,
)
NAMED = st.dictionaries(WORDS, st.none(), max_size=3).map(list)


def extend(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.builds(lambda schema, count: [schema] * count, part, st.sampled_from([1, 2, 20, 600]))
    several = st.lists(part, min_size=1, max_size=4) | many
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(WORDS, part, max_size=3)},
            optional={
                "required": NAMED,
                "additionalProperties": part,
                "minProperties": st.integers(0, 9),
                "propertyNames": st.fixed_dictionaries({"pattern": PATTERNS}),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": part},
            optional={"minItems": st.sampled_from([0, 3, 1_000, 10**9]), "prefixItems": several, "contains": part},
        ),
        st.fixed_dictionaries({"patternProperties": st.dictionaries(PATTERNS, part, max_size=2)}),
        *(st.fixed_dictionaries({keyword: several}) for keyword in ("oneOf", "anyOf", "allOf")),
        st.fixed_dictionaries({"not": part}),
        st.fixed_dictionaries({"if": part, "then": part, "else": part}),
        st.fixed_dictionaries(
            {"dependentSchemas": st.dictionaries(WORDS, part, max_size=2)}, optional={"unevaluatedProperties": part}
        ),
    )


LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "pattern": PATTERNS,
            "minLength": st.sampled_from([0, 5, 10**6]),
            "maxLength": st.sampled_from([3, 10**6]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "multipleOf": st.sampled_from([3, 9973, 0.01, 1e-9, 10**30]),
            "minimum": st.integers(-(10**20), 10**20),
        },
    ),
    st.fixed_dictionaries({"enum": st.lists(st.integers() | WORDS, max_size=5)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/properties/a", "#/items", "#/no"])}),
    st.fixed_dictionaries({"type": st.sampled_from([None, 1.5, "text", [], {}])}),
)
SCHEMAS = st.recursive(LEAVES, extend, max_leaves=8)
PARTS = st.sampled_from(['"a"', '"b"', '""', "r0", "r1", "r2", "/[ab]+/", "/(a|b)*a/", "r0*", "(r1 r2)?"])
SEQUENCES = st.lists(PARTS, min_size=1, max_size=4).map(" ".join)
ALTERNATIVES = st.lists(SEQUENCES, min_size=1, max_size=3).map(" | ".join)
GRAMMARS = st.tuples(ALTERNATIVES, ALTERNATIVES, ALTERNATIVES).map(
    lambda rules: "\n".join(["start: r0", *(f"r{index}: {rule}" for index, rule in enumerate(rules))])
)
CONSTRAINTS = st.one_of(
    st.builds(lambda schema: {"json": schema}, SCHEMAS.filter(lambda schema: isinstance(schema, dict))),
    st.builds(lambda pattern: {"regex": pattern}, PATTERNS),
    st.builds(lambda grammar: {"grammar": grammar}, GRAMMARS),
)


def check_generated(server: Service, count: int) -> None:
    @seed(46)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(CONSTRAINTS)
    def check(constraint: dict[str, Any]) -> None:
        answer = server.post("/v1/completions", {**body(**constraint), "max_tokens": 24, "temperature": 1, "seed": 1})
        if answer.status == 500:  # the grammar grew too large while its text was generated
            assert "request failed" in answer.error["message"]
        elif answer.status != 200:
            check_refused(answer, 400, 503)

    with witness(server):
        check()


@pytest.mark.parametrize(
    "count", [10, pytest.param(300, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.nightly)]
)
def test_no_generated_constraint_harms_the_server(server, count):
    check_generated(server, count)
