"""Parsers that are recognized from chat templates."""

import pytest

from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from quire.parsing.recognition import recognized

_LOOP = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"

# The parts of templates that tell the format, in the style of each family.
_TEMPLATES = {
    ("qwen3", "hermes"): (
        "{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}return a json object within <tool_call>"
        '</tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        "{{ content.split('</think>')[-1] }}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    ),
    (None, "hermes"): "{% if tools %}<tools></tools>{% endif %}<tool_call>{{ call | tojson }}</tool_call>",
    (
        "qwen3",
        "qwen3_coder",
    ): "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter></tool_call><think></think>",
    (None, "qwen3_coder"): "<tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>\n{{ value }}\n</parameter>",
    ("deepseek_v3", "deepseek_v3"): (
        "{{ '<｜Assistant｜>' + content.split('</think>')[-1] }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    ),
    ("glm45", "glm45"): "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key></tool_call><think></think>",
    ("kimi_k2", "kimi_k2"): "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<think></think>",
    (None, "kimi_k2"): "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
    (None, "mistral"): "[AVAILABLE_TOOLS][/AVAILABLE_TOOLS][TOOL_CALLS]{{ calls }}",
    ("mistral", "mistral"): "[SYSTEM_PROMPT]First think: [THINK]...[/THINK][/SYSTEM_PROMPT][TOOL_CALLS]",
    (None, "llama3_json"): (
        "<|start_header_id|>system<|end_header_id|>\n\nRespond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.<|python_tag|>'
    ),
    ("openai_gptoss", "openai"): "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>",
    ("seed_oss", "seed_oss"): "<seed:think></seed:think><seed:tool_call>\n<function=f>\n<parameter=a></seed:tool_call>",
    ("minimax_m2", "minimax_m2"): '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a"><think></think>',
    (None, "apertus"): "{%- set inner_token = '<|inner_prefix|>' -%}{%- set calls_token = '<|tools_prefix|>' -%}",
    ("cohere_command3", "cohere_command3"): (
        "<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|><|START_RESPONSE|><|END_RESPONSE|>"
    ),
    ("cohere_command4", "cohere_command3"): "<|END_THINKING|><|START_ACTION|><|START_TEXT|>{{ text }}<|END_TEXT|>",
    (
        "deepseek_v41",
        "deepseek_v41",
    ): '<think></think><｜DSML｜ calls>\n<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="a">',
    (None, "dots"): '<dots_function_call>\n<invoke name="f">\n<parameter name="a">',
    (None, "functiongemma"): "<start_function_call>call:{{ name }}{ {{ key }}:<escape>{{ value }}<escape>",
    ("gemma4", "gemma4"): "<|channel>thought\n<channel|>{{ '<|tool_call>call:' + name }}<tool_call|>",
    ("inkling", "inkling"): "<|message_model|><|content_thinking|><|content_text|><|content_invoke_tool_json|>",
    ("k2_horizon", "k2_horizon"): "<ifm|think></ifm|think><ifm|tool_calls><ifm|tool_call><ifm|arg_key>",
    ("kimi_k3", "kimi_k3"): (
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|close|>message<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="{{ name }}" index="1"<|sep|><|open|>argument key="{{ key }}"'
    ),
    ("qwen3", "minicpm5"): '</think><function name="f"><param name="a">',
    ("minicpmv", "qwen3_coder"): "</think><reserved_12><tool_call><function=f><parameter=a>",
    ("minimax_m3", "minimax_m3"): "{% set mark = ']<]minimax[>[' %}<mm:think></mm:think>",
    ("muse", "muse"): '<|start|>assistant to=self<|message|><atem:function_calls>\n<atem:invoke name="f">',
    ("muse_glimmer", "muse_glimmer"): "MuseGlimmer ATEM chat template requires a dict <atem:function_calls>",
    ("plamo3", "plamo3"): (
        "<|plamo:begin_think:plamo|><|plamo:end_think:plamo|><|plamo:begin_tool_requests:plamo|>"
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|><|plamo:tag|>"
    ),
    ("qwen3", None): "<｜User｜>{{ content }}<｜Assistant｜>{{ content.split('</think>') }}",
    (None, None): "{{ bos_token }}",
}


@pytest.mark.parametrize(("names", "template"), _TEMPLATES.items())
def test_the_markers_of_a_template_tell_its_parsers(names: tuple[str | None, str | None], template: str):
    assert recognized(_LOOP + template) == names
    assert {names[0]} <= {None, *REASONING}
    assert {names[1]} <= {None, *TOOLS}
