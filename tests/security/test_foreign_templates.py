# ruff: noqa: E501  (templates)
"""Chat templates that never end, or that make texts without end: the request fails, and nothing else notices."""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from quire.checkpoints.hub import bundled_model
from quire.text import chat_template
from quire.text.chat_template import ChatTemplateError, render, render_here
from support.attack_variants import TEMPLATES
from support.attacks import attack, check_refused, steady_memory, witness
from support.server import Host, Service, eventually

CHAT = [{"role": "user", "content": "Hello"}]
BOMBS = {
    "product": "{{ 'a' * 10**10 }}",
    "product of a list": "{{ [1] * 10**10 }}",
    "center": "{{ 'a'.center(10**10) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "power": "{{ 10**(10**8) }}",
    "powers": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "doubling": "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by sums": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by output": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set t %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = t %}{% endfor %}",
    "doubling of lists in lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "doubling of dicts in dicts": "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': "
    "ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "namespaces in namespaces": "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set t = namespace(a=0, b=0) %}"
    "{% set t.a = ns.x %}{% set t.b = ns.x %}{% set ns.x = t %}{% endfor %}{{ ns.x }}",
    "equal lists": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y"
    " = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "tuples as keys": "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{{ {ns.x: 1} }}",
    "format": "{{ '%0999999999d' % 5 }}",
    "format filter": "{{ '%0999999999d' | format(5) }}",
    "format method": "{{ '{:>9999999999}'.format('a') }}",
    "replace": "{% set a = 'a' * 100000 %}{{ a.replace('a', a).replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 100000 %}{{ a | replace('a', a) | replace('a', a) }}",
    "join": "{% set a = 'a' * 1000000 %}{{ a.join(range(99999) | map('string')) }}",
    "join filter": "{% set a = 'a' * 1000000 %}{{ range(99999) | join(a) }}",
    "indent": "{{ ('\n' * 100000) | indent(10**6) }}",
    "json": "{{ [[[[1]]]] | tojson(indent=10**10) }}",
    "wordwrap": "{{ ('a b' * 100000) | wordwrap(1, wrapstring='c' * 100000) }}",
    "batch": "{{ range(9) | batch(10**10, 1) | list }}",
    "slice": "{{ range(9) | slice(10**9) | list }}",
    "round": "{{ 1 | round(10**9, 'ceil') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}a{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in range(999) recursive %}{{ loop(range(999)) }}{% endfor %}",
    "maps": "{{ range(99999)" + " | map('abs')" * 50 + " | list | length }}",
    "selections": "{{ range(99999)" + " | select('number')" * 50 + " | list | length }}",
    "searches": "{% set a = 'a' * 5000000 %}{% for i in range(99999) %}{{ (a ~ 'b') in a }}{% endfor %}",
    "searches from the end": "{% set a = 'a' * 900000 %}{% for i in range(99) %}{{ ('b' + a).rfind('b' + a + 'a') }}"
    "{% endfor %}",
    "comparisons": "{% set a = 'a' * 5000000 %}{% set b = a ~ 'b' %}{% set c = a ~ 'b' %}{% for i in range(99999) %}"
    "{% if " + " and ".join(["b == c"] * 100) + " %}{% endif %}{% endfor %}",
    "slices kept": "{% macro f(n, s) %}{% set t = s[1:] %}{% if n %}{{ f(n - 1, t) }}{% endif %}{% endmacro %}"
    "{% for i in range(99999) %}{{ f(150, 'a' * 999999) }}{% endfor %}",
    "plain text": "{% for a in range(99999) %}{% for b in range(999) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
    "defaults": "{% set a = 'a' * 900000 %}{{ range(99999) | map('default', a, true) | map('replace', 0, a) | list }}",
    "a deep expression": ("{{ " + "+".join(["a"] * 150) + " }}") * 150,
    "many names": "".join(f"{{% set a{i} = 1 %}}{{% if a %}}{{% endif %}}" for i in range(9999)),
    "large integers": "{% set a = ('f' * 4000000) | int(base=16) %}{{ a // 7 % 5 }}{% for i in range(99999) %}{% set b = a"
    " // 7 %}{% endfor %}",
}


@pytest.fixture
def quick_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = chat_template.Limits(cpu_seconds=0.3, memory_bytes=256 << 20, total_seconds=600.0, result_bytes=1 << 20)
    monkeypatch.setattr(chat_template, "_LIMITS", limits)


def _bounded(template: str) -> str | None:
    """What comes of rendering here: a prompt, None, or an error; within bounds of time."""
    chat_template._compile.cache_clear()
    began = time.thread_time()
    result = _either(template)
    assert time.thread_time() - began < 10  # of processor time; 0.1 are meant, and a second for compiling
    return result


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_the_models_template_takes_a_moment_in_the_server(name: str) -> None:
    result = _bounded(BOMBS[name])
    assert result is None or "the chat template" in result or len(result) < 1 << 20


@pytest.mark.nightly
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_the_models_template_takes_little_memory_in_the_server(name: str) -> None:
    tracemalloc.start()
    try:
        _either(BOMBS[name])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 400 << 20


@pytest.mark.parametrize(
    "name", ["product", "power", "ranges", "format method", "doubling of lists in lists", "lipsum"]
)
def test_a_bomb_is_an_error_that_says_which_limit_it_exceeds(quick_limit: None, name: str) -> None:
    with pytest.raises(
        ChatTemplateError, match=r"the chat template (takes too much: its? (needs|result|process)|failed)"
    ):
        render(BOMBS[name], CHAT)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BOMBS)
def test_every_bomb_ends_in_a_worker_process(quick_limit: None, name: str) -> None:
    try:
        assert len(render(BOMBS[name], CHAT)) <= 1 << 20
    except ChatTemplateError as error:
        assert "the chat template" in str(error)  # noqa: PT017


RARE = {
    "'%s' % 5": "{{ '%s-%03d' % ('a', 5) }}",
    "format": "{{ '{:>5}'.format('a') }}{{ '%s' | format('a') }}",
    "center": "{{ 'a'.center(5) }}{{ 'a' | center(5) }}",
    "groupby": "{% for k, v in messages | groupby('role') %}{{ k }}{{ v | length }}{% endfor %}",
    "batch": "{{ range(5) | batch(2, 0) | list }}{{ range(5) | slice(2) | list }}",
    "objects": "{{ dict(a=1) }}{{ cycler(1, 2).next() }}{{ namespace(a=1) }}{{ {}.items() }}",
    "markup": "{{ ('<' | e) ~ '<' }}{{ ('<' | e) + '<' }}{{ '<' | safe }}",
    "autoescape": "{% autoescape true %}{{ '<' }}{{ '<' ~ '>' }}{% endautoescape %}",
    "other filters": "{{ 'a b' | wordcount }}{{ [1, 2] | sum }}{{ 'a b c d e f' | truncate(5) }}{{ [1] | pprint }}",
}
COMMON = {
    "operators": "{{ 'a' + 'b' }}{{ 1 + 2.5 }}{{ 2 * 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ (1,) * 2 }}{{ 2 ** 5 }}{{ 7 % 4 }}",
    "concatenations": "{{ 'a' ~ 1 ~ none ~ undefined_name ~ [1] }}",
    "output": "{{ none }}{{ true }}{{ 1.5 }}{{ [1, 'a'] }}{{ {'a': 1} }}{{ (1, 2) }}{{ undefined_name }}",
    "slices": "{{ messages[0:] | length }}{{ 'abc'[1:] }}{{ [1, 2, 3][::-1] }}",
    "loops": "{% for a in [1, 2, 3] %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{% else %}x"
    "{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for a in 'abc' if a != 'b' %}{{ a }}"
    "{{ loop.revindex }}{% endfor %}{% for a in nothing %}{% else %}none{% endfor %}",
    "recursive loops": "{% for a in [[1, [2]], [3]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}{{ a }}"
    "{% endif %}{% endfor %}",
    "loop controls": "{% for a in range(9) %}{% if a == 2 %}{% continue %}{% endif %}{% if a == 5 %}{% break %}{% endif %}"
    "{{ a }}{% endfor %}",
    "methods": "{{ ' a '.strip() }}{{ 'a,b'.split(',') }}{{ 'ab'.replace('a', 'cc') }}{{ '-'.join(['a', 'b']) }}"
    "{{ {'a': 1}.get('a') }}{{ 'abc'.startswith(('a', 'b')) }}{{ 'A'.lower() }}{{ 'aXa'.rsplit('X') }}",
    "filters": "{{ ' a ' | trim }}{{ 'a' | upper }}{{ messages | map(attribute='role') | join(',') }}{{ [3, 1] | sort }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ x | default('y') }}{{ [1, 1] | unique | list }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}{{ 'a\nb' | indent(2) }}{{ '5' | int + 1 }}{{ 2.567 |"
    " round(1) }}{{ 'ab' | replace('a', 'c') }}{{ [1, 2] | last }}{{ 'abc' | first }}{{ [1, 2] | max }}{{ 'ab' | reverse }}"
    "{{ 'abc' | list }}{{ 5 | string }}{{ -5 | abs }}{{ 'a b' | title }}{{ [0, 1] | select | list }}{{ 'ab' | join('-') }}",
    "json": "{{ {'a': [1, 'é']} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}{{ 'a' | tojson }}",
    "macros": "{% macro f(a, b='c') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{{ f(1, b=2) }}"
    "{% call f(3) %}x{% endcall %}{{ f(1) | length }}",
    "blocks": "{% block a %}x{{ messages | length }}{% endblock %}{{ self.a() }}{% set t %}y{{ 1 }}{% endset %}{{ t }}"
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% with a = 5 %}{{ a }}{% endwith %}{% generation %}g{% endgeneration %}",
    "tests": "{{ 1 is number }}{{ 'a' is in 'abc' }}{{ 'a' in ['a'] }}{{ 1 is eq 1 }}{{ x is defined }}{{ none is none }}"
    "{{ 4 is divisibleby 2 }}{{ 1 < 2 < 3 }}{{ 'a' == 'b' or not false }}",
    "namespaces": "{% set ns = namespace(a=1, b=[]) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b +"
    " [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}",
    "errors": "{{ 'a' + 1 }}",
    "undefined errors": "{{ x.y.z }}",
    "refusals": "{{ raise_exception('no ' ~ messages[0].role) }}",
}


def _either(template: str, **options: Any) -> str | None:
    try:
        return render_here(template, CHAT, **options)
    except ChatTemplateError as error:
        return str(error)


@pytest.mark.parametrize("name", COMMON)
def test_what_usual_templates_do_is_rendered_in_the_server_as_without_bounds(name: str) -> None:
    result = _either(COMMON[name])
    assert result is not None
    assert result == _either(COMMON[name], is_bounded=False)


@pytest.mark.parametrize("name", RARE)
def test_what_few_templates_do_is_rendered_in_a_worker_process(name: str) -> None:
    assert _either(RARE[name]) is None
    assert render(RARE[name], CHAT) == _either(RARE[name], is_bounded=False)


def test_errors_in_a_worker_process_have_the_same_text() -> None:
    for text in (
        "{{ raise_exception('%s' % 'reason') }}",
        "{{ '%s' % 5 }}{{ 1 / 0 }}",
        "{{ 'a' | center(5) }}{{ none.x.y }}",
    ):
        with pytest.raises(ChatTemplateError) as caught:
            render(text, CHAT)
        assert str(caught.value) == _either(text, is_bounded=False)


# ---- generated templates


def _check_equal(template: str) -> None:
    """What is rendered within bounds is what is rendered without; what is not is not compared, since it may not end."""
    result = _either(template)
    if result is not None and len(result) < 100_000:
        assert result == _either(template, is_bounded=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEMPLATES)
def test_a_generated_template_is_rendered_as_without_bounds(template: str) -> None:
    _check_equal(template)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None)
@given(TEMPLATES)
def test_many_generated_templates_are_rendered_as_without_bounds(template: str) -> None:
    _check_equal(template)


# ---- a server


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    model = tmp_path_factory.mktemp("bomb") / "model"
    shutil.copytree(bundled_model(), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    bomb = "{% if enable_thinking is defined and enable_thinking == 'bomb' %}" + BOMBS["ranges"] + "{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": bomb + config["chat_template"]}))
    host = Host(model=str(model), dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
    yield host
    host.close()


@pytest.fixture(scope="module")
def service(host: Host) -> Iterator[Service]:
    service = host.serve(trust_request_chat_template=True)
    usual = [_chat(), _chat(chat_template=RARE["center"])]
    with steady_memory(lambda: attack(service, "/v1/chat/completions", usual)):
        yield service


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": CHAT, "max_tokens": 4, **fields}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"enable_thinking": "bomb"}}, "messages"),
        ({"chat_template": BOMBS["ranges"]}, "chat_template"),
        ({"chat_template": BOMBS["product"]}, "chat_template"),
    ],
    ids=["the model's template", "a request's template", "a large text"],
)
def test_a_client_gets_an_error_while_others_are_answered(
    host: Host, service: Service, quick_limit: None, fields: dict[str, Any], param: str
) -> None:
    with witness(service):
        for answer in attack(service, "/v1/chat/completions", [_chat(**fields)] * 2):
            check_refused(answer, 400)
            assert answer.error["param"] == param
    eventually(lambda: host.is_idle)
