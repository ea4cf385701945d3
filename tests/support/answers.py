"""Whole answers in the formats of the model families, and what is in them."""

from typing import Any, NamedTuple


class Sample(NamedTuple):
    """An answer in the format of a tool parser. calls: (name, the value of the arguments)."""

    format: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


DEFINITIONS = [
    _tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        celsius={"type": "boolean"},
        limit={"type": "number"},
    ),
    _tool(
        "edit_file",
        path={"type": "string"},
        text={"type": "string"},
        options={"type": "object"},
        lines={"type": "array"},
    ),
    _tool("now"),
]

PARIS = ("get_weather", {"city": "Paris"})
NOW: tuple[str, Any] = ("now", {})
_NESTED = {"path": "a/b.py", "options": {"a": [1, {"b": None}], "c": {}}, "text": 'if x: {"</tool_call>"} [TOOL_CALLS]'}
_NESTED_JSON = (
    r'{"path": "a/b.py", "options": {"a": [1, {"b": null}], "c": {}}, "text": "if x: {\"</tool_call>\"} [TOOL_CALLS]"}'
)

SAMPLES = [
    Sample("hermes", "The weather is fine.", [], "The weather is fine."),
    Sample("hermes", "a < b, <tool_cal and <tools> are no calls", [], "a < b, <tool_cal and <tools> are no calls"),
    Sample(
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nDone.',
        [PARIS, NOW],
        "I look.\n\nDone.",
    ),
    Sample(
        "hermes",
        '<tool_call>{"arguments": %s, "name": "edit_file"}</tool_call>' % _NESTED_JSON,  # noqa: UP031  (has braces)
        [("edit_file", _NESTED)],
    ),
    Sample("hermes", '\n\n<tool_call>\n{"name": "now"}\n</tool_call>', [NOW]),
    Sample(
        "hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', [PARIS]
    ),
    Sample(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🏔️ \\u00e9"}}\n</tool_call>',
        [("get_weather", {"city": "Zürich 🏔️ é"})],
    ),
    Sample("hermes", "<tool_call>no JSON</tool_call> or", [], "<tool_call>no JSON</tool_call> or"),
    Sample(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>\n<tool_call>{"name": "now"}',
        [PARIS, NOW],
    ),
    Sample("hermes", '<tool_call>{"city": "Paris"}</tool_call>', [], '<tool_call>{"city": "Paris"}</tool_call>'),
    Sample(
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=celsius>\nTrue\n</parameter>\n<parameter=limit>\n0.5\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3, "celsius": True, "limit": 0.5}), NOW],
        "I look.\n\n",
    ),
    Sample(
        "qwen3_coder",
        '<function=edit_file>\n<parameter=text>\nif a < b:\n    print("ä\\n</p>")\n\n</parameter>\n'
        '<parameter=options>\n{"a": [1, null]}\n</parameter>\n'
        "<parameter=lines>\n['x', True]\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "edit_file",
                {"text": 'if a < b:\n    print("ä\\n</p>")\n', "options": {"a": [1, None]}, "lines": ["x", True]},
            )
        ],
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</function>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 2})],
    ),
    Sample("qwen3_coder", "Use <function> and <tool_call>.", [], "Use <function> and <tool_call>."),
    Sample(
        "mimo",
        "<tool_call><function=get_weather><parameter=city>\nParis\n</parameter></function></tool_call>",
        [("get_weather", {"city": "\nParis\n"})],
    ),
    Sample(
        "step3p5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        [PARIS],
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now</function>\n</tool_call>",
        [PARIS, NOW],
    ),
    Sample("qwen3_coder", "<tool_call> now\n<function=now>\n</function>\n</tool_call>", [NOW]),
    Sample(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        [PARIS],
    ),
    Sample("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Sample(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        [PARIS, NOW],
    ),
    Sample(
        "llama3_json",
        'I look:\n{"type": "function", "name": "now", "parameters": {}};{"name": "edit_file", "parameters": '
        + _NESTED_JSON
        + "}",
        [NOW, ("edit_file", _NESTED)],
        "I look:",
    ),
    Sample("llama3_json", '{"name": "Ada", "age": 36}', [], '{"name": "Ada", "age": 36}'),
    Sample("llama3_json", ' {"a": {"name": "now", "parameters": {}}}', [], ' {"a": {"name": "now", "parameters": {}}}'),
    Sample("llama3_json", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    Sample("llama3_json", 'So: {"name": "now", "parameters": {}} Do you want more?', [NOW], "So: Do you want more?"),
    Sample("llama3_json", 'In {x} and {"a": 1}: {"name": "now", "parameters": {}}', [NOW], 'In {x} and {"a": 1}: '),
    Sample("llama3_json", '{"name": "now"} {"parameters": {}} {', [], '{"name": "now"} {"parameters": {}} {'),
    Sample(
        "pythonic",
        "[get_weather(city='Paris', days=3, celsius=True), now()]",
        [("get_weather", {"city": "Paris", "days": 3, "celsius": True}), NOW],
    ),
    Sample(
        "pythonic",
        r"""<|python_start|>[edit_file(path="it's ä\u00e9\n", options={'a': (1, None,), "b": {}}, lines=[-1.5, "x)]"]"""
        ")]<|python_end|>",
        [("edit_file", {"path": "it's äé\n", "options": {"a": [1, None], "b": {}}, "lines": [-1.5, "x)]"]})],
    ),
    Sample("pythonic", "[1, 2] and [a](b)", [], "[1, 2] and [a](b)"),
    Sample("pythonic", "[link(text)](url)", [], "[link(text)](url)"),
    Sample(
        "olmo3",
        'I look.\n<function_calls>\nget_weather(city="Paris")\nnow()\n</function_calls>',
        [PARIS, NOW],
        "I look.\n",
    ),
    Sample("lfm2", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Wait.', [PARIS], "Wait."),
    Sample(
        "lfm2",
        "<|tool_call_start|> [edit_file(path='sed -n '1,9p' a.py', lines={07, 1_0}, options={}, from=00.5)]"
        "<|tool_call_end|>",
        [("edit_file", {"path": "sed -n '1,9p' a.py", "lines": [7, 10], "options": {}, "from": 0.5})],
    ),
    Sample(
        "lfm2",
        """<|tool_call_start|>[edit_file(text='python3 -c "import a\nf(b='\\,'))"'), now()]<|tool_call_end|>""",
        [("edit_file", {"text": """python3 -c "import a\nf(b='\\,'))\""""}), NOW],
    ),
    Sample(
        "lfm2",
        "<|tool_call_start|>[edit_file(path='a 'b', c', text='d')]<|tool_call_end|>",  # ends at either of two quotes
        [],
        "<|tool_call_start|>[edit_file(path='a 'b', c', text='d')]<|tool_call_end|>",
    ),
    Sample("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", [], "<|tool_call_start|>[]<|tool_call_end|>"),
    Sample("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|> [now()]<|tool_call_end|>\nDone.", [NOW], "\nDone."),
    Sample(
        "lfm2",
        "<|tool_call_start|>[now()]<|tool_call_end|>\n<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>",
        [NOW, PARIS],
    ),
    Sample("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>[1] says it.", [NOW], "[1] says it."),
    Sample("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>now()<|tool_call_end|>", [NOW], "now()"),
    Sample(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        [PARIS, NOW],
    ),
    Sample(
        "mistral",
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]edit_file[CALL_ID]a1[ARGS]' + _NESTED_JSON,
        [PARIS, ("edit_file", _NESTED)],
        "I look.",
    ),
    Sample("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
    Sample("mistral", "[TOOL_CALL] is a marker, [TOOL_CALLS] too", [], "[TOOL_CALL] is a marker, [TOOL_CALLS] too"),
    Sample(
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit_file\n```json\n'
        + _NESTED_JSON
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, ("edit_file", _NESTED)],
        "I look.",
    ),
    Sample(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
    ),
    Sample(
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">12</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("get_weather", {"city": "12", "days": 3}), NOW],
        "I look.\n\n",
    ),
    Sample(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [PARIS],
    ),
    Sample(
        "deepseek_v4",
        '<｜DSML｜toolcalls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="days" string="true">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="limit" string="false">5.0</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="city">"Paris"</｜DSML｜parameter>\n<｜DSML｜parameter name="other" string="true">5'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="more" string="false">{"a": 1}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="rest">as it is\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\nDone.',
        [
            (
                "get_weather",
                {"days": 5, "limit": 5, "city": "Paris", "other": "5", "more": {"a": 1}, "rest": "as it is\n"},
            )
        ],
        "\nDone.",
    ),
    Sample(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="arguments" '
        'string="false">{"city": "Paris", "days": "3"}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="input">{"town": "Paris"}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="input">{"city": "Paris"}'
        '</｜DSML｜parameter><｜DSML｜parameter name="days">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        [
            ("get_weather", {"city": "Paris", "days": 3}),
            ("get_weather", {"input": {"town": "Paris"}}),
            ("get_weather", {"input": {"city": "Paris"}, "days": 3}),
        ],
    ),
    Sample(
        "glm45",
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3}), NOW],
        "I look.\n",
    ),
    Sample(
        "glm45",
        '<tool_call>edit_file<arg_key>options</arg_key><arg_value>{"a": "</tool_call>"}</arg_value><arg_key>text'
        "</arg_key><arg_value>a\n<b> \\</arg_value></tool_call>",
        [("edit_file", {"options": {"a": "</tool_call>"}, "text": "a\n<b> \\"})],
    ),
    Sample(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, NOW],
        "I look.",
    ),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|> so \n<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        "<|tool_call_end|> and <|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_calls_section_end|>",
        [NOW, NOW],
        " and ",
    ),
    Sample("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [NOW]),
    Sample(
        "kimi_k2",
        "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>",
        [],
        "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    Sample("kimi_k2", "<|tool_calls_section_begin|>none", [], "<|tool_calls_section_begin|>none"),
    Sample(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [("get_weather", {"city": "Paris", "days": 3}), NOW],
    ),
    Sample(
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        [PARIS, NOW],
    ),
    Sample(
        "gigachat3",
        'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        [PARIS],
        "I look.",
    ),
    Sample("gigachat3", 'I look.<|function_call|>{"name": "now", "arguments": {}}</s>', [NOW], "I look."),
    Sample("gigachat3", "A function call, <|message_sep|>or none</s>", [], "A function call, or none"),
    Sample("granite", '[{"name": "now", "arguments": "a text"}]', [("now", "a text")]),
    Sample("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    Sample(
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n<function_call> {"name": "now", '
        '"arguments": {}}',
        [PARIS, NOW],
    ),
    Sample(
        "jamba",
        'I look. <tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}},\n{"name": "now", "arguments": '
        "{}}\n]</tool_calls>",
        [PARIS, NOW],
        "I look. ",
    ),
    Sample(
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        [PARIS],
        "I look.",
    ),
    Sample(
        "longcat",
        '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>',
        [PARIS],
    ),
    Sample(
        "phi4_mini_json",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        [PARIS, NOW],
    ),
    Sample("xlam", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    Sample("xlam", '<think>I look.</think>\n[{"name": "now", "arguments": {}}]', [NOW], "<think>I look.</think>"),
    Sample("xlam", '<think></think>{"name": "now", "arguments": {}}', [NOW], "<think></think>"),
    Sample("xlam", '[TOOL_CALLS][{"name": "now", "arguments": {}}]\nDone.', [NOW], "\nDone."),
    Sample("xlam", 'So: ```\n[{"name": "now", "arguments": {}}]\n```', [NOW], "So: "),
    Sample("xlam", "<think>Hm</think> [1] ```\n[2]\n```", [], "<think>Hm</think> [1] ```\n[2]\n```"),
    Sample("xlam", 'So:\n```json\n[{"name": "now", "arguments": {}}]\n```', [NOW], "So:\n"),
    Sample("openai", "Plain text.", [], "Plain text."),
    Sample(
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [PARIS, NOW],
        "I look.",
    ),
    Sample("openai", " to=functions.now<|channel|>commentary<|message|><|call|>", [NOW]),
    Sample("openai", " to=user<|channel|>final<|message|>It is.<|end|>\nNow", [], "It is.\nNow"),
    Sample("openai", " to=functions.now and no message", [], " to=functions.now and no message"),
    Sample("openai", "<|channel|>final<|message|>It is {1 < 2}.<|return|>", [], "It is {1 < 2}."),
]
