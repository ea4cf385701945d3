"""llguidance as a back end: each kind of constraint, wrong constraints, and the tokens of each kind of tokenizer."""

import json
import random
import re
import threading

import numpy as np
import pytest

from quire import SamplingParams, StructuredOutputsParams
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.messages.engine import EngineCoreRequest
from quire.platform.untrusted.pool import shared_pool
from quire.structured.constraint import Constraint
from quire.structured.gate import GrammarGate, Loaded
from quire.structured.guidance import GuidanceBackend
from quire.structured.vocabulary import Vocabulary
from quire.structured.workers import GrammarCompiler
from support.waiting import LONGEST

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled_model())


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, tokenizer.vocab_size + 40, [EOS, 0])


@pytest.fixture(scope="module")
def backend(vocabulary):
    return GuidanceBackend(vocabulary)


def allowed(backend, matcher, vocab_size: int) -> np.ndarray:
    bits = np.empty((1, -(-vocab_size // 32)), np.int32)
    backend.fill([matcher], bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def text_of(backend, tokenizer, params: StructuredOutputsParams, seed: int, length: int = 200) -> str | None:
    """A text of uniformly drawn tokens under the masks; None if it did not end within `length` tokens."""
    chance, vocab_size = random.Random(seed), tokenizer.vocab_size + 40
    constraint = Constraint(backend.compile(params), None, [EOS, 0])
    output: list[int] = []
    while len(output) < length:
        choices = allowed(backend, constraint.matcher, vocab_size)
        forced = list(constraint.forced())
        assert not forced or forced[0] in choices
        token = int(chance.choice(choices))
        if forced:
            token = forced[0]
        elif EOS in choices and chance.random() < 0.3:
            token = EOS
        constraint.advance(token)
        assert constraint.error is None
        if token in (EOS, 0):
            return tokenizer.decode(output)
        output.append(token)
    return None


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"}],
    "triggers": ["<f="],
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return len(person["name"]) <= 8 and 0 <= person["age"] <= 99 and len(person) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("params", "holds"),
    [
        ({"json": PERSON}, is_person),
        ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, is_person),
        ({"json": {"const": '<|im_end|>ä€😀"\\'}}, lambda text: json.loads(text) == '<|im_end|>ä€😀"\\'),
        (
            {"json": {"type": "object", "properties": {"a": True}}, "disable_additional_properties": True},
            lambda text: json.loads(text).keys() <= {"a"},
        ),
        ({"regex": r"[a-f]{2,5}-\d"}, lambda text: re.fullmatch(r"[a-f]{2,5}-\d", text)),
        ({"choice": ["yes", "no.*", "é", "yesterday"]}, lambda text: text in ("yes", "no.*", "é", "yesterday")),
        ({"grammar": 'start: "a" "b"~1..3 | /[0-9]{2}/'}, lambda text: re.fullmatch(r"ab{1,3}|[0-9]{2}", text)),
        ({"grammar": 'root ::= "x" root | "y" [0-4]'}, lambda text: re.fullmatch(r"x*y[0-4]", text)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_texts_that_end_match_the_constraint(backend, tokenizer, params, holds):
    texts = [text_of(backend, tokenizer, StructuredOutputsParams(**params), seed) for seed in range(12)]
    assert sum(text is not None for text in texts) >= 3
    assert all(holds(text) for text in texts if text is not None)


def accepts(backend, tokenizer, params: StructuredOutputsParams, text: str) -> bool:
    matcher = backend.compile(params)
    return all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False))) and matcher.accept(EOS)


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
NUMBER = {"begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</n>"}


@pytest.mark.parametrize(
    ("tag", "right", "wrong"),
    [
        (OLD_TAG, ["", "free text", "so <f=a>22</f> and <f=a>1</f>"], ["<f=a>2</f>", "<f=b>1</f>", "<f=a>1"]),
        (TAG, ["<a></a>", "<a>any\n<b></a>"], ["<a>", "<a></a>x", ""]),
        (
            {"type": "sequence", "elements": [TAG, {"type": "json_schema", "json_schema": {"type": "integer"}}]},
            ["<a>b</a>12"],
            ["<a>b</a>", "12"],
        ),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": "a/b"}, {"type": "regex", "pattern": "c/+"}]},
            ["a/b", "c//"],
            ["a", "c"],
        ),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["xxy"], ["x"]),
        ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ["", "abab"], ["aba"]),
        (
            {"type": "triggered_tags", "triggers": ["<n"], "tags": [NUMBER], "at_least_one": True},
            ["<n>1</n>", "a <n>1</n> b"],
            ["a", "<n>a</n>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<n"], "tags": [NUMBER], "stop_after_first": True},
            ["a", "a <n>1</n>"],
            ["<n>1</n> b"],
        ),
        (
            {"type": "tags_with_separator", "separator": ", ", "tags": [NUMBER]},
            ["", "<n>1</n>, <n>2</n>"],
            ["<n>1</n>,"],
        ),
    ],
    ids=str,
)
def test_structural_tags_constrain_what_is_inside_of_tags(backend, tokenizer, tag, right, wrong):
    tag = tag if "structures" in tag else {"type": "structural_tag", "format": tag}
    params = StructuredOutputsParams(structural_tag=json.dumps(tag))
    assert all(accepts(backend, tokenizer, params, text) for text in right)
    assert not any(accepts(backend, tokenizer, params, text) for text in wrong)


def test_json_has_single_spaces_or_none_or_what_a_pattern_allows(backend, tokenizer):
    def check(text: str, **options) -> bool:
        return accepts(backend, tokenizer, StructuredOutputsParams(json_object=True, **options), text)

    assert check('{"a": [1, 2]}')
    assert not check('{"a":[1,2]}')
    assert not check('{ "a": [1, 2]}')
    assert check('{"a":[1,2]}', disable_any_whitespace=True)
    assert not check('{"a": [1, 2]}', disable_any_whitespace=True)
    assert check('{"a":\n1}', whitespace_pattern=r"\n?")


def nested(levels: int, kind: str = "properties") -> str:
    opening = '{"type": "object", "properties": {"a": ' if kind == "properties" else '{"not": '
    closing = "}}" if kind == "properties" else "}"
    return opening * levels + "true" + closing * levels


WRONG = {
    "a type that does not exist": ({"json": {"type": "text"}}, ""),
    "a type that is a number": ({"json": {"type": 1.5}}, r"the keyword 'type' must be a type or a list of .* got 1\.5"),
    "a negative length": ({"json": {"minLength": -1}}, "'minLength' must be a whole number of at least 0, got -1"),
    "a bound that is no number": ({"json": {"maximum": "x"}}, "'maximum' must be a number, got \"x\""),
    "a reference that leads nowhere": ({"json": {"$ref": "#/$defs/a"}}, "leads nowhere"),
    "a remote reference": ({"json": {"$ref": "http://127.0.0.1/a"}}, "schemas are not downloaded"),
    "a schema without documents": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
    "a schema that is false": ({"json": "false"}, "no document is valid"),
    "a reference to itself": ({"json": {"$ref": "#"}}, ""),
    "a pattern that backtracks": (
        {"json": {"type": "object", "propertyNames": {"pattern": "^(a|a)*$"}, "properties": {f"{'a' * 60}!": {}}}},
        "the grammar is too complex: it needs more than 1 s of processor time",
    ),
    "pairs of thousands of schemas": (
        {"json": {"not": {"oneOf": [True] * 4_900}}},
        "the grammar is too complex: it needs more than",
    ),
    "a large multiple": ({"json": {"type": "integer", "multipleOf": 999_983}}, "too complex: it needs more than"),
    "rules in a long chain": (
        {
            "grammar": "\n".join(
                ["start: r0", *(f'r{i}: "t{i}" r{i + 1} | "u{i}" r{i * 31 % 3000}' for i in range(3000)), 'r3000: "x"']
            )
        },
        "its process ended with SIGSEGV",
    ),
    "a pattern against a length": ({"json": {"type": "string", "pattern": "^a$", "minLength": 5}}, ""),
    "an unknown format": ({"json": {"format": "colour"}}, "Unknown format: colour"),
    "unique items": ({"json": {"uniqueItems": True}}, "uniqueItems is not supported"),
    "nesting": ({"json": nested(1_000)}, "nested too deeply"),
    "nested negation": ({"json": nested(1_000, "not")}, "nested too deeply"),
    "thousands of properties": ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(9_000)}}}, "large"),
    "hundreds of properties": ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(3_000)}}}, ""),
    "a huge enum": ({"json": {"enum": [f"choice {i}" for i in range(100_000)]}}, ""),
    "branches that multiply": (
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}} for i in range(8)]}
                    for j in range(8)
                ]
            }
        },
        "",
    ),
    "many patterns at once": ({"json": {"allOf": [{"pattern": f"a.*{i}"} for i in range(20)]}}, "at most 8 patterns"),
    "a lone surrogate": ({"json": '{"const": "\\ud800"}'}, ""),
    "a broken regex": ({"regex": "a("}, ""),
    "lookahead": ({"regex": "(?=a)a"}, "look-around"),
    "a backreference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "a regex that matches nothing": ({"regex": r"[^\s\S]"}, "no text matches"),
    "nested repetition": ({"regex": "(a{5000}){5000}"}, ""),
    "large classes repeated": ({"regex": r"(\w{1,1000}){1,1000}"}, ""),
    "nested groups": ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, ""),
    "a long regex": ({"regex": "a" * 1_000_000}, "at most"),
    "too many choices": ({"choice": [f"choice {i}" for i in range(100_000)]}, "at most 10000 texts"),
    "a grammar without end": ({"grammar": 'start: "a" start'}, ""),
    "a rule that does not exist": ({"grammar": "start: other"}, "unknown name"),
    "a broken GBNF grammar": ({"grammar": "root ::= ("}, "cannot be read"),
    "a broken Lark grammar": ({"grammar": "start: ("}, ""),
    "an empty grammar": ({"grammar": "%%%"}, ""),
    "a structural tag that is no JSON": ({"structural_tag": "{"}, "not valid JSON"),
    "a structural tag without format": ({"structural_tag": '{"type": "structural_tag"}'}, "'format'"),
    "a structural tag whose format is null": (
        {"structural_tag": '{"type": "structural_tag", "format": null}'},
        "format must be an object, got null",
    ),
    "a structural tag with a wrong element": (
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "or"}]}}'},
        r"format\.elements\[0\] has no field 'elements'",
    ),
    "a structural tag with a wrong trigger": (
        {"structural_tag": '{"type": "structural_tag", "structures": [], "triggers": [1]}'},
        "triggers must be strings",
    ),
    "an unknown structural tag": (
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "x"}}'},
        "'x' is not supported",
    ),
    "a broken pattern of whitespace": ({"json_object": True, "whitespace_pattern": "("}, ""),
}


@pytest.fixture(scope="module")
def gate(backend, vocabulary):
    return GrammarGate(lambda: Loaded(backend, GrammarCompiler({}, vocabulary, shared_pool()), [EOS]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_constraints_are_refused_with_the_reason(gate, name):
    """Those without a message may be refused because they take too long."""
    fields, message = WRONG[name]
    woken = threading.Event()
    gate.connect(woken.set)
    with pytest.raises(ValueError, match=message or ".") as error:  # noqa: PT012
        source = EngineCoreRequest(name, [1], SamplingParams(structured_outputs=fields), 0, 8)
        while not gate.ready(source):
            assert woken.wait(LONGEST)
            woken.clear()
    assert str(error.value).startswith("structured_outputs: ")
    assert "NoExtension" not in str(error.value)


def test_a_model_without_end_of_sequence_is_refused(tokenizer):
    with pytest.raises(ValueError, match="end-of-sequence"):
        Vocabulary(tokenizer, tokenizer.vocab_size, [])


def test_ids_without_a_token_are_never_allowed_and_several_tokens_may_end_a_text(backend, tokenizer):
    matcher = backend.compile(StructuredOutputsParams(regex="(.|\\n)*"))
    choices = allowed(backend, matcher, tokenizer.vocab_size + 40)
    assert choices.max() < tokenizer.vocab_size
    assert {0, EOS} <= set(choices.tolist())
    assert 1 not in choices  # <|im_start|> stands for no text


def test_forced_tokens_are_those_that_the_tokenizer_writes(backend, tokenizer):
    schema = {"const": {"a long name of a property": ["and", "its", "value"], "<|im_start|>": 12345}}
    matcher = backend.compile(StructuredOutputsParams(json=schema))
    forced: list[int] = []
    while not matcher.is_finished:
        tokens = matcher.forced()
        assert tokens
        assert all(map(matcher.accept, tokens))
        forced += tokens
    text = json.dumps(schema["const"])
    assert tokenizer.decode(forced) == text
    assert forced[:8] == tokenizer.encode(text, add_special_tokens=False)[:8]
    assert 1 not in forced


def test_a_replayed_text_is_in_the_same_state(backend, tokenizer):
    grammar = backend.compile(StructuredOutputsParams(json=PERSON))
    tokens = tokenizer.encode('{"name": "Ann", "age": 7}', add_special_tokens=False)
    constraint = Constraint(grammar.fork(), None, [EOS])
    for count, token in enumerate(tokens):
        replayed = Constraint(grammar.fork(), None, [EOS])
        for earlier in tokens[:count]:
            replayed.advance(earlier)
        assert list(replayed.forced()) == list(constraint.forced())
        masks = [allowed(backend, one.matcher, tokenizer.vocab_size + 40) for one in (constraint, replayed)]
        assert np.array_equal(*masks)
        constraint.advance(token)
    assert constraint.forced() == [EOS]
