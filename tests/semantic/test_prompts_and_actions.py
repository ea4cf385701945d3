"""What is read from requests of each API, and how actions change them."""

from typing import Any

import pytest

from quire.semantic.prompt import Api, said, without_last_text
from quire.semantic.rewriting import rewritten
from quire.semantic.rules import Action, Sampling

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
ASKED = "What is this?"
BODIES: list[tuple[Api, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}, PICTURE]}]}),
    ("completions", {"prompt": ASKED}),
    ("completions", {"prompt": [ASKED, "Another one."]}),
    ("responses", {"input": ASKED, "instructions": "Be brief."}),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]}),
    ("messages", {"system": [{"type": "text", "text": "Be brief."}], "messages": [{"role": "user", "content": ASKED}]}),
    ("ollama_chat", {"messages": [{"role": "user", "content": ASKED, "images": ["AAAA"]}]}),
    ("ollama_generate", {"prompt": ASKED, "system": "Be brief.", "images": ["AAAA"]}),
]


@pytest.mark.parametrize(("api", "body"), BODIES)
def test_the_last_text_of_the_user_is_found(api: Api, body: dict[str, Any]):
    what = said(api, body)
    assert what.text == ASKED
    brief = "Be brief." in str(body)
    assert what.chars == len(ASKED) + (len("Be brief.") if brief else 0)
    assert what.media == ("image" in str(body))
    assert not what.tools


def test_results_of_tools_are_no_text_of_the_user():
    result = {"type": "tool_result", "tool_use_id": "1", "content": "42"}
    turns = [{"role": "user", "content": ASKED}, {"role": "user", "content": [result]}]
    assert said("messages", {"messages": turns, "tools": [{"name": "f"}]}) == (ASKED, len(ASKED), True, False)


@pytest.mark.parametrize("value", [None, 5, [], [5], [{"role": 5, "content": 6}], [{"content": {"a": 1}}], {"a": 1}])
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate"])
def test_nonsense_is_left_to_the_server(api: Api, value: Any):
    names = ("messages", "prompt", "input", "system", "instructions", "images", "tools", "options", "reasoning")
    body = dict.fromkeys(names, value)
    said(api, body)
    action = Action(model="m", reasoning=True, system_prompt="s", sampling=Sampling(temperature=1.0), cache_salt="c")
    assert rewritten(api, body, action, "m")["model"] == "m"
    without_last_text(api, body)


def test_a_system_prompt_precedes_that_of_the_request():
    action = Action(system_prompt="Be kind.")
    changed = [rewritten(api, body, action, None) for api, body in BODIES]
    assert changed[0]["messages"][0] == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert changed[1]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert changed[2] == BODIES[2][1]
    assert changed[4]["instructions"] == "Be kind.\n\nBe brief."
    assert changed[5]["instructions"] == "Be kind."
    assert changed[6]["system"] == [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    assert changed[8]["system"] == "Be kind.\n\nBe brief."
    assert "Be kind." not in str(BODIES)  # the given bodies are not changed


def test_reasoning_has_a_switch_in_each_api():
    def switched(api: Api, **action: Any) -> dict[str, Any]:
        return rewritten(api, {}, Action(**action), None)

    assert switched("chat", reasoning=False) == {"chat_template_kwargs": {"enable_thinking": False}}
    low = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}
    assert switched("chat", reasoning_effort="low") == low
    assert switched("responses", reasoning=True) == {"reasoning": {"effort": "medium"}}
    assert switched("responses", reasoning=False) == {"reasoning": {"effort": "none"}}
    assert switched("messages", reasoning=False) == {"thinking": {"type": "disabled"}}
    assert switched("ollama_chat", reasoning_effort="high") == {"think": "high"}
    assert switched("ollama_generate", reasoning=False) == {"think": False}
    assert switched("completions", reasoning=False) == {}


def test_sampling_parameters_are_for_requests_that_give_none():
    action = Action(sampling=Sampling(temperature=0.5, max_tokens=9, repetition_penalty=1.1))
    body = {"temperature": 0.0, "max_completion_tokens": 4}
    assert rewritten("chat", body, action, None) == {**body, "repetition_penalty": 1.1}
    assert rewritten("responses", {}, action, None)["max_output_tokens"] == 9
    options = {"temperature": 0.5, "num_predict": 9, "repeat_penalty": 2.0}
    assert rewritten("ollama_chat", {"options": {"repeat_penalty": 2.0}}, action, None) == {"options": options}


@pytest.mark.parametrize(("api", "body"), BODIES)
def test_requests_that_differ_in_their_last_text_are_the_same_without_it(api: Api, body: dict[str, Any]):
    rest = without_last_text(api, body)
    if ("image" in str(body) and api != "ollama_generate") or isinstance(body.get("prompt"), list):
        assert rest is None
        return
    other = eval(repr(body).replace(ASKED, "And that?"))
    assert rest == without_last_text(api, other)
    assert ASKED not in str(rest)
