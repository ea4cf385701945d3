"""Structured outputs offline: LLM.generate with the bundled model, and with SmolLM2-135M-Instruct."""

import json
import re
from collections.abc import Callable
from decimal import Decimal

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.checkpoints.metadata import load_tokenizer
from quire.structured.guidance import GuidanceBackend
from quire.structured.vocabulary import Vocabulary
from support.schema_suite import schema_suite
from support.smollm2 import smollm2

pytestmark = pytest.mark.texts

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["Rust", "Python", "C"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<call>"],
}


def is_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


def is_called_rightly(text: str) -> bool:
    return all(is_person(content) for content in re.findall("<call>(.*?)</call>", text))


KINDS: dict[str, tuple[dict, Callable[[str], object]]] = {
    "json": ({"json": PERSON}, is_person),
    "json without spaces": ({"json": PERSON, "disable_any_whitespace": True}, lambda text: text[:9] == '{"name":"'),
    "json object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": r"[A-Z][a-z]{1,8}-\d{1,4}"}, re.compile(r"[A-Z][a-z]{1,8}-\d{1,4}").fullmatch),
    "choice": ({"choice": ["red", "green", "blue"]}, {"red", "green", "blue"}.__contains__),
    "Lark": ({"grammar": 'start: "(" /[a-z ]{1,9}/ ")"'}, re.compile(r"\([a-z ]{1,9}\)").fullmatch),
    "GBNF": ({"grammar": 'root ::= ("a" | "b")? "c" [0-9]'}, re.compile("[ab]?c[0-9]").fullmatch),
    "structural tag": ({"structural_tag": json.dumps(TAGS)}, is_called_rightly),
}
PROMPT = "A short description of a person, in the form that was asked for: "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", max_model_len=512, max_num_seqs=16)


def check_all_kinds(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            n=1 if temperature == 0 else 2,
            temperature=temperature,
            seed=7,
            max_tokens=150,
            structured_outputs=StructuredOutputsParams(**fields),
        )
        for fields, _ in KINDS.values()
    ]
    ended = 0
    for (name, (_, holds)), output in zip(KINDS.items(), llm.generate([PROMPT] * len(params), params), strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                ended += 1
                assert holds(completion.text), (name, completion.text)
            else:
                assert completion.finish_reason == "length"
    assert ended >= sum(p.n for p in params) - 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_each_kind_holds_at_any_temperature(llm, temperature):
    check_all_kinds(llm, temperature)


def test_a_mixed_batch_gives_each_request_what_it_gives_alone(llm):
    plain = [
        SamplingParams(temperature=1, seed=3, max_tokens=30),
        SamplingParams(temperature=0, max_tokens=30, logprobs=2),
    ]
    constrained = [
        SamplingParams(temperature=1, seed=seed, max_tokens=60, structured_outputs=fields, logprobs=logprobs)
        for seed, logprobs in ((1, None), (2, 1))
        for fields, _ in KINDS.values()
    ]
    params = [*plain, *constrained]
    together = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(params), params)]
    alone = [llm.generate(PROMPT, one)[0].outputs[0].token_ids for one in params]
    assert together == alone
    unlogged = [one.clone(logprobs=None) for one in params]  # forced tokens are taken ahead only without logprobs
    assert [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(params), unlogged)] == together


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "text"}}, "structured_outputs: "),
        ({"regex": "a("}, "structured_outputs: .*unclosed group"),
        ({"regex": r"[^\s\S]"}, "structured_outputs: no text matches the constraint"),
        ({"json": {"uniqueItems": True}}, "structured_outputs: uniqueItems is not supported"),
    ],
)
def test_a_wrong_constraint_is_a_value_error_and_the_engine_goes_on(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPT, SamplingParams(structured_outputs=fields))
    assert llm.generate(PROMPT, SamplingParams(structured_outputs={"choice": ["yes"]}))[0].outputs[0].text == "yes"


def test_min_tokens_and_ignore_eos_end_where_they_say(llm):
    fields = {"choice": ["yes"]}
    short = llm.generate(PROMPT, SamplingParams(structured_outputs=fields, min_tokens=10, max_tokens=20))[0].outputs[0]
    assert (short.text, short.finish_reason) == ("yes", "stop")
    params = SamplingParams(structured_outputs=fields, ignore_eos=True, max_tokens=20)
    long = llm.generate(PROMPT, params)[0].outputs[0]
    assert (long.text[:3], long.finish_reason, len(long.token_ids)) == ("yes", "length", 20)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "none"}, "backend must be one of"),
        ({"size": 1}, "structured_outputs_config has no field 'size'"),
        ({"cpu_seconds": 0}, "cpu_seconds must be a number of seconds, above 0 and at most 3600, got 0"),
        ({"total_seconds": "x"}, "total_seconds must be a number of seconds, above 0 and at most 3600, got 'x'"),
        ({"disable_any_whitespace": "no"}, "disable_any_whitespace must be one of"),
    ],
)
def test_wrong_options_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LLM(structured_outputs_config=config)


def test_options_hold_for_all_requests():
    llm = LLM(max_model_len=256, structured_outputs_config={"disable_any_whitespace": True})
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs={"json": PERSON})
    assert llm.generate(PROMPT, params)[0].outputs[0].text.startswith('{"name":"')


@pytest.fixture(scope="module")
def large_llm() -> LLM:
    return LLM(smollm2(), max_model_len=1024, max_num_seqs=64)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_each_kind_holds_with_smollm2(large_llm, temperature):
    check_all_kinds(large_llm, temperature)


def without_dialect(schema: dict | bool) -> dict | bool:
    """The schema as applications write it: without the dialect and the comment that each schema of the suite has."""
    names = {"$schema", "$comment"}
    return schema if isinstance(schema, bool) else {name: schema[name] for name in schema if name not in names}


def is_valid(schema: dict | bool, text: str) -> bool:
    """Numbers are also read as decimals, since jsonschema divides floats to check multipleOf, which rounds."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) or (
        jsonschema.Draft202012Validator(exact).is_valid(json.loads(text, parse_float=Decimal))
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_documents_of_the_official_suite_that_end_are_valid(large_llm, tmp_path):
    """At least 90 % of the documents end within 256 tokens, for every fourth schema.

    The penalty keeps so small a model from repeating itself in numbers and texts that have no limit of length.
    """
    tokenizer = load_tokenizer(smollm2())
    backend = GuidanceBackend(Vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id]))
    accepted, messages, params = [], [], []
    for case in schema_suite(tmp_path)[::4]:
        fields = StructuredOutputsParams(json=json.dumps(case.schema))
        try:
            backend.compile(fields)
        except ValueError:
            continue
        schema = json.dumps(without_dialect(case.schema))[:1000]
        request = f"JSON schema: {schema}\n\nWrite the shortest JSON document that is valid for this schema."
        accepted.append(case)
        messages.append([{"role": "user", "content": request}])
        params.append(
            SamplingParams(temperature=0.7, frequency_penalty=0.5, seed=1, max_tokens=256, structured_outputs=fields)
        )
    outputs = [output.outputs[0] for output in large_llm.chat(messages, params)]
    ended = [
        (case, output.text) for case, output in zip(accepted, outputs, strict=True) if output.finish_reason == "stop"
    ]
    for case, text in ended:
        assert is_valid(case.schema, text), (case, text)
    assert len(ended) >= 0.9 * len(accepted)
