import datetime
import json
from copy import deepcopy

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.text.chat_template import ChatTemplateError, render

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + "Today Date: " + date_string + "\n\n" + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\n\n" }}{% endfor %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {%- if message.role == "assistant" and message.reasoning_content and loop.index0 == ns.last %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {% else %}{% continue %}
    {% endif %}
{% endfor %}"""

TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA_3, "Qwen 2.5": QWEN, "Mistral": MISTRAL}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": "Grüße & <b>你好</b>!"},
    {"role": "assistant", "content": " Hi. "},
    {"role": "user", "content": "Go on\n"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für <Ort>", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}
TOOL_CHAT = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains.", "reasoning_content": "Rain."},
]


def transformers_render(template, messages, **options):
    without_null = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return render_jinja_template([without_null], chat_template=template, **options)[0][0]


def with_arguments(arguments):
    """The tool chat with the arguments of its call replaced."""
    chat = deepcopy(TOOL_CHAT)
    chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
    return chat


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_is_rendered_as_transformers_renders_it(template, add_generation_prompt):
    options = {**TOKENS, "add_generation_prompt": add_generation_prompt}
    assert render(template, CHAT, **options) == transformers_render(template, CHAT, **options)


@pytest.mark.parametrize("template", [QWEN, LLAMA_3], ids=["Qwen 2.5", "Llama 3"])
def test_tools_and_their_calls_are_rendered_as_transformers_renders_them(template):
    options = {**TOKENS, "tools": TOOLS, "add_generation_prompt": False}
    prompt = render(template, TOOL_CHAT, **options)
    assert prompt == transformers_render(template, TOOL_CHAT, **options)
    assert "Wetter für <Ort>" in prompt


def test_tool_call_arguments_given_as_json_text_become_objects():
    chat = with_arguments(json.dumps(CALL["function"]["arguments"]))
    assert render(QWEN, chat) == render(QWEN, TOOL_CHAT)
    assert chat[1]["tool_calls"][0]["function"]["arguments"].startswith("{")  # the caller's own is left alone
    assert '"arguments": {}' in render(QWEN, with_arguments(""))


def test_tool_call_arguments_that_are_no_json_are_an_error_that_names_the_field():
    with pytest.raises(ChatTemplateError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        render(QWEN, with_arguments("{city"))


@pytest.mark.parametrize("content", ["It rains", "It rains ", "It  rains\n", [{"type": "text", "text": "It rains "}]])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_final_message_is_continued_where_transformers_continues_it(template, content):
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    options = {**TOKENS, "add_generation_prompt": False, "continue_final_message": True}
    as_text = [CHAT[0], {"role": "assistant", "content": content if isinstance(content, str) else content[0]["text"]}]
    assert render(template, chat, **options) == transformers_render(template, as_text, **options)


LISTS_ONLY = """\
{% for message in messages %}{{ message['role'] }}:
{%- for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %};
{%- endfor %}"""
STRINGS_AND_LISTS = """\
{% macro show(content) %}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro %}
{% for message in messages %}{{ message.role }}:{{ show(message.content) }};{% endfor %}"""
LISTS_BY_A_VARIABLE = """\
{% for message in messages %}{% set parts = message.content %}{{ message.role }}:
{%- for part in parts[0:9] %}{{ part.text }}{% endfor %};{% endfor %}"""
STRINGS_ONLY = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"


def test_parts_of_every_type_that_is_text_are_text():
    parts = [
        "a",
        {"type": "text", "text": "b"},
        {"type": "input_text", "text": "c"},
        {"type": "output_text", "text": "d"},
        {"type": "refusal", "refusal": "e"},
        {"type": "thinking", "thinking": "f"},
    ]
    chat = [{"role": "user", "content": parts}]
    assert render(STRINGS_ONLY, chat) == "user:a\nb\nc\nd\ne\nf;"
    assert render(LISTS_ONLY, chat) == "user:abcdef;"


def test_a_message_without_content_has_an_empty_one():
    for message in ({"role": "judge"}, {"role": "judge", "content": None}, {"role": "judge", "content": []}):
        assert render(STRINGS_ONLY, [message]) == "judge:;"
        assert render(LISTS_ONLY, [message]) == "judge:;"


def test_the_texts_of_a_tool_are_one_string_to_a_template_that_takes_both():
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    both += "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(both, [{"role": "tool", "content": parts}, {"role": "user", "content": parts}]) == "a\nb;<a><b>;"


def test_each_template_gets_the_form_of_content_that_it_knows():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    for template in (LISTS_ONLY, STRINGS_AND_LISTS, LISTS_BY_A_VARIABLE):
        assert render(template, chat) == "user:ab;user:c;"
    assert render(STRINGS_ONLY, chat) == "user:a\nb;user:c;"
    assert render(LISTS_ONLY, [{"role": "user", "content": [{"type": "image"}, "what?"]}]) == "user:<image>what?;"


def test_an_image_for_a_template_that_takes_text_only_is_an_error_that_names_it():
    with pytest.raises(ChatTemplateError, match=r"messages\[0\].content\[0\] is of type image_url"):
        render(STRINGS_ONLY, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_the_final_message_is_continued_in_its_last_text_part():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(LISTS_ONLY, chat, **options) == transformers_render(LISTS_ONLY, chat, **options) == "user:ab"
    assert chat[0]["content"][1]["text"] == "b"


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (CHATML, [{"role": "assistant", "tool_calls": []}], "no text to go on with"),
        ("nothing", CHAT, "leaves out the last message"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_an_error(template, chat, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        render(template, chat, add_generation_prompt=False, continue_final_message=True)


def test_a_generation_prompt_and_a_continued_message_exclude_each_other():
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, CHAT, continue_final_message=True)


def test_reasoning_reaches_the_template_under_each_of_its_names():
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render(template, [{"role": "assistant", name: "hm"}]) == "hm|hm"


def test_variables_reach_the_template():
    assert render(QWEN, CHAT, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert render("{{ documents[0].title }}", CHAT, documents=[{"title": "T", "text": ""}]) == "T"
    assert render("{{ strftime_now('%Y') }}", CHAT) == str(datetime.datetime.now().year)
    assert (
        render("{{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", CHAT) == '{"a":1,"b":"é<"}'
    )


def test_a_template_that_refuses_the_chat_says_why():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render(MISTRAL, CHAT[1:], **TOKENS)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ range(99999999)|list }}",
    ],
)
def test_the_sandbox_cannot_be_left(attack):
    with pytest.raises(ChatTemplateError):
        render(attack, CHAT)


@pytest.mark.parametrize(
    "broken", ["{% if %}", "{{ missing.field }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{% for %}"]
)
def test_a_broken_template_is_an_error_with_its_reason(broken):
    with pytest.raises(ChatTemplateError, match=r"the chat template (is not valid|failed): .+"):
        render(broken, CHAT)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is of type str: expected an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is of type int"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\] is of type int"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\].tool_calls\[0\] is of type str"),
    ],
)
def test_messages_that_are_no_chat_are_an_error_that_names_the_place(messages, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        render(CHATML, messages)


def test_the_same_template_is_compiled_once(monkeypatch):
    template = "{{ messages[0].content }} compiled once"
    render(template, CHAT)
    monkeypatch.setattr(jinja2.Environment, "compile", None)
    assert render(template, CHAT).endswith("compiled once")


def test_a_checkpoint_renders_and_encodes_a_chat_as_transformers_does(checkpoints, backends):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}
    ours, theirs = checkpoints.both(backends["sentencepiece"], config)
    prompt = render(ours.chat_template, CHAT, **ours.special_tokens)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.encode(prompt, add_special_tokens=False) == expected
