"""Whole answers in further formats, beside those of support.answers."""

from support.answers import NOW, PARIS, SAMPLES, Sample

_NESTED = {"path": "a/b.py", "options": {"a": [1, {"b": None}], "c": {}}}
_NESTED_JSON = '{"path": "a/b.py", "options": {"a": [1, {"b": null}], "c": {}}}'
_OPTIONS_JSON = '{"a": [1, {"b": null}], "c": {}}'
_THREE_DAYS = ("get_weather", {"city": "Paris", "days": 3})
_MM = "]<]minimax[>["
_MUSE_CALL = '<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>'

NEWER = [
    Sample("qwen3_json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [NOW]),
    Sample("step5", "<tool_call><function=now></function></tool_call>", [NOW]),
    Sample(
        "deepseek_v41",
        'I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">'
        '\n<｜DSML｜ parameter name="city" string="true">Paris'
        '</｜DSML｜ parameter>\n<｜DSML｜ parameter name="days" string="false">'
        "3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        [_THREE_DAYS, NOW],
        "I look.\n\n",
    ),
    Sample(
        "deepseek_v41",
        '<｜DSML｜ invoke name="edit_file">\n<｜DSML｜ parameter name="options" string="false">'
        f'{_OPTIONS_JSON}</｜DSML｜ parameter>\n<｜DSML｜ parameter name="text" string="true"><b> </｜DSML｜ invoke>'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>",
        [("edit_file", {"options": _NESTED["options"], "text": "<b> </｜DSML｜ invoke>"})],
    ),
    Sample(
        "hy_v3",
        "I look.\n<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>"
        "\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>"
        "</tool_calls>\nDone.",
        [_THREE_DAYS, NOW],
        "I look.\n\nDone.",
    ),
    Sample(
        "hy_v4",
        '<tool_calls><tool_call>edit_file<arg_key>text</arg_key><arg_value>a <tool_call> \\ "b"\n</arg_value><arg_key>'
        f"options</arg_key><arg_value>{_OPTIONS_JSON}</arg_value></tool_call></tool_calls>",
        [("edit_file", {"text": 'a <tool_call> \\ "b"\n', "options": _NESTED["options"]})],
    ),
    Sample("hy_v4", "Use <tool_calls> and <arg_key>.", [], "Use <tool_calls> and <arg_key>."),
    Sample(
        "apertus",
        'I look. <|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|> Done.',
        [PARIS, NOW],
        "I look.  Done.",
    ),
    Sample("apertus", f'<|tools_prefix|>[{{"edit_file": {_NESTED_JSON}}}]<|tools_suffix|>', [("edit_file", _NESTED)]),
    Sample(
        "apertus",
        '<|tools_prefix|>[{"edit_file": {"text": "<|tools_suffix|> }]"}}]<|tools_suffix|>',
        [("edit_file", {"text": "<|tools_suffix|> }]"})],
    ),
    Sample("apertus", "<|tools_prefix|>[1, 2]<|tools_suffix|>", [], "<|tools_prefix|>[1, 2]<|tools_suffix|>"),
    Sample(
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Paris"}},\n    '
        f'{{"tool_call_id": "1", "tool_name": "edit_file", "parameters": {_NESTED_JSON}}}\n]<|END_ACTION|>',
        [PARIS, ("edit_file", _NESTED)],
    ),
    Sample("cohere_command3", "<|START_RESPONSE|>It is <b>.<|END_RESPONSE|>", [], "It is <b>."),
    Sample(
        "cohere_command4",
        '<|START_TEXT|>I look.<|END_TEXT|><|START_ACTION|>[{"tool_name": "edit_file", "parameters": {"text": '
        '"<|END_ACTION|>"}}]<|END_ACTION|>',
        [("edit_file", {"text": "<|END_ACTION|>"})],
        "I look.",
    ),
    Sample(
        "dots",
        'I look.\n<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">\nParis\n</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke></dots_function_call>\nDone.',
        [_THREE_DAYS, NOW],
        "I look.\n\nDone.",
    ),
    Sample(
        "dots",
        '<dots_function_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</dots_function_call>'
        "<dots_function_call><invoke name = 'edit_file'><parameter name = 'text'></invoke> {</parameter><parameter "
        f"name=options>{_OPTIONS_JSON}</parameter></invoke></dots_function_call>",
        [PARIS, ("edit_file", {"text": "</invoke> {", "options": _NESTED["options"]})],
    ),
    Sample("dots", "<dots_function_call> is a marker", [], "<dots_function_call> is a marker"),
    Sample(
        "functiongemma",
        "I look.<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:<escape>3<escape>}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        [_THREE_DAYS, NOW],
        "I look.",
    ),
    Sample(
        "functiongemma",
        "<start_function_call>call:edit_file{text:<escape>}, {a:1}\n<end_function_call><escape>,options:<escape>"
        f"{_OPTIONS_JSON}<escape>,lines:[1,<escape>b<escape>]}}<end_function_call>",
        [("edit_file", {"text": "}, {a:1}\n<end_function_call>", "options": _NESTED["options"], "lines": [1, "b"]})],
    ),
    Sample("functiongemma", "<start_function_call>none", [], "<start_function_call>none"),
    Sample(
        "gemma4",
        'I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,celsius:true,limit:-1.5}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [("get_weather", {"city": "Paris", "days": 3, "celsius": True, "limit": -1.5}), NOW],
        "I look.",
    ),
    Sample(
        "gemma4",
        '<|tool_call>call:edit_file{text:<|"|>{"a": [1]}, <tool_call|>\n<|"|>'
        ',options:{a:[1,{b:null}],c:{},<|"|>d<|"|>: '
        '<|"|>e<|"|>},lines:[[],[<|"|>x<|"|>,y]]}<tool_call|>',
        [
            (
                "edit_file",
                {
                    "text": '{"a": [1]}, <tool_call|>\n',
                    "options": {"a": [1, {"b": None}], "c": {}, "d": "e"},
                    "lines": [[], ["x", "y"]],
                },
            )
        ],
    ),
    Sample("gemma4", '<|tool_call>:get_weather(city:<|"|>Paris<|"|>)<tool_call|>', [PARIS]),
    Sample("gemma4", "<|tool_call>call:now<tool_call|>", [NOW]),
    Sample("gemma4", "a <|tool> b", [], "a <|tool> b"),
    Sample(
        "inkling",
        "<|content_text|>I look.<|end_message|><|message_model|>functions<|content_invoke_tool_json|>"
        '{"name": "get_weather", "args": {"city": "Paris"}}<|end_message|><|message_model|><|content_invoke_tool_json|>'
        f'{{"name": "edit_file", "args": {_NESTED_JSON}}}<|end_message|><|content_model_end_sampling|>',
        [PARIS, ("edit_file", _NESTED)],
        "I look.",
    ),
    Sample("inkling", "Plain text, <|content_text|>more.", [], "Plain text, more."),
    Sample(
        "inkling",
        '<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|><|message_model|><|content_text|>Done.',
        [NOW],
        "Done.",
    ),
    Sample(
        "muse",
        f" to=get_weather<|message|><atem:function_calls>\n{_MUSE_CALL}\n</atem:function_calls><|eom|>"
        '<|start|>assistant to=now.now<|message|><atem:function_calls>\n<atem:invoke name="now.now">\n</atem:invoke>\n'
        "</atem:function_calls><|eom|><|start|>assistant to=commentary<|message|>I look.<|eot|>",
        [PARIS, NOW],
        "I look.",
    ),
    Sample(
        "muse",
        ' to=files.edit<|message|><atem:function_calls>\n<atem:invoke name="edit_file">'
        '\n<atem:parameter name="text">a to=b'
        '\n</atem:invoke></atem:parameter>\n<atem:parameter name="options">'
        f"{_OPTIONS_JSON}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
        [("edit_file", {"text": "a to=b\n</atem:invoke>", "options": _NESTED["options"]})],
    ),
    Sample("muse", f" to=user<|message|>Write to=x or {_MUSE_CALL}<|eot|>", [], f"Write to=x or {_MUSE_CALL}"),
    Sample("muse", "No markers to=", [], "No markers to="),
    Sample("muse", _MUSE_CALL, [PARIS]),
    Sample("muse_glimmer", f"<|message|>I look.<|eom|> to=get_weather<|message|>{_MUSE_CALL}", [PARIS], "I look."),
    Sample(
        "k2_horizon",
        "I look.<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Paris"
        "</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>3</ifm|arg_value>\n</ifm|tool_call>\n"
        "<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls> Done.",
        [_THREE_DAYS, NOW],
        "I look. Done.",
    ),
    Sample(
        "k2_horizon",
        "<ifm|tool_calls><ifm|tool_call>edit_file<ifm|arg_key>text</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
        "<ifm|arg_value></ifm|tool_call></ifm|arg_value><ifm|arg_key>more</ifm|arg_key><ifm|arg_type>array[object]"
        "</ifm|arg_type><ifm|arg_value>[1]</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
        [("edit_file", {"text": "</ifm|tool_call>", "more": [1]})],
    ),
    Sample(
        "k2_horizon",
        f'<ifm|tool_calls><ifm|tool_call>{{"name": "edit_file", "arguments": {_NESTED_JSON}}}</ifm|tool_call>'
        "</ifm|tool_calls>",
        [("edit_file", _NESTED)],
    ),
    Sample(
        "kimi_k3",
        "<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        [_THREE_DAYS, NOW],
        "I look.",
    ),
    Sample(
        "kimi_k3",
        '<|open|>tools<|sep|>\n  <|open|>call tool="edit_file" index="1"<|sep|>\n    <|open|>'
        'argument key="a &quot;b&quot;" '
        'type="string"<|sep|>5 </call> <|close|>call<|sep|>\n<|close|>argument<|sep|>\n<|open|>argument key="options" '
        f'type="object"<|sep|>{_OPTIONS_JSON}<|close|>argument<|sep|>\n<|close|>call<|sep|>',
        [("edit_file", {'a "b"': "5 </call> <|close|>call<|sep|>\n", "options": _NESTED["options"]})],
    ),
    Sample(
        "minicpm5",
        'I look.\n<function name="get_weather"><param name="city">Paris</param>'
        '<param name="days">3</param></function>\n'
        "<function name='now'></function>\nDone.",
        [_THREE_DAYS, NOW],
        "I look.\n\nDone.",
    ),
    Sample(
        "minicpm5",
        '<function name="edit_file"><param name="text"><![CDATA[<a> & </param></function>'
        ' &lt;]]></param><param name="path">'
        f'&lt;b&gt; &amp;amp; c < d &am</param><param name="options">{_OPTIONS_JSON}</param></function>',
        [
            (
                "edit_file",
                {
                    "text": "<a> & </param></function> &lt;",
                    "path": "<b> &amp; c < d &am",
                    "options": _NESTED["options"],
                },
            )
        ],
    ),
    Sample("minicpm5", "A <function> and a <function name=> too", [], "A <function> and a <function name=> too"),
    Sample(
        "minimax_m3",
        f'I look.\n{_MM}<tool_call>\n{_MM}<invoke name="get_weather">\n{_MM}<city>'
        f"Paris{_MM}</city>\n{_MM}<days>3{_MM}</days>"
        f'\n{_MM}</invoke>\n{_MM}<invoke name="now">\n{_MM}</invoke>\n{_MM}</tool_call>',
        [_THREE_DAYS, NOW],
        "I look.\n",
    ),
    Sample(
        "minimax_m3",
        f'{_MM}<tool_call>{_MM}<invoke name="edit_file">{_MM}<text><b>{_MM}</c> {_MM} </text>{_MM}</text>{_MM}<options>'
        f"{_MM}<a>{_MM}<b>1{_MM}</b>{_MM}<b>2{_MM}</b>{_MM}</a> {_MM}</options>{_MM}<lines>{_MM}<item>x{_MM}</item>"
        f"{_MM}</lines>{_MM}<more>y{_MM}</more>{_MM}<more>z{_MM}</more>{_MM}</invoke>{_MM}</tool_call>",
        [
            (
                "edit_file",
                {
                    "text": f"<b>{_MM}</c> {_MM} </text>",
                    "options": {"a": {"b": ["1", "2"]}},
                    "lines": ["x"],
                    "more": ["y", "z"],
                },
            )
        ],
    ),
    Sample("minimax_m3", f"A {_MM} and {_MM}<tool_call> too", [], f"A {_MM} and {_MM}<tool_call> too"),
    Sample(
        "plamo3",
        "I look.<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        "get_weather<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        "<|plamo:constrain|>json<|plamo:msg|>"
        '{"city": "Paris"}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>edit_file<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{_NESTED_JSON}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
        "<|plamo:tag|>",
        [PARIS, ("edit_file", _NESTED)],
        "I look.",
    ),
]

ALL_SAMPLES = [*SAMPLES, *NEWER]
