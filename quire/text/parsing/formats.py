"""The formats of tool calls, by the names that vLLM gives them."""

from quire.text.parsing.calls import ToolFormat, json_calls, pythonic_calls, tagged_call
from quire.text.parsing.harmony import harmony

_NAME = r"(?P<name>[^\s<>\"{｜]+)"
_LLAMA = "dictionary of argument name and its value"  # the words of Llama's chat templates


def _json(begin: str, *end: str) -> ToolFormat:
    """<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>"""
    return ToolFormat(body=json_calls, begin=(begin,), end=end)


def _functions(section: str) -> ToolFormat:
    """<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>"""
    return ToolFormat(
        body=tagged_call,
        sections=(f"<{section}>",),
        begin=("<function=",),
        header=rf"{_NAME}\s*>",
        parameter=("<parameter=", (">\n", ">"), ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")),
        end=("</function>", f"</{section}>"),
    )


def _invoke(sections: tuple[str, ...], end: tuple[str, ...], prefix: str = "") -> ToolFormat:
    """<function_calls><invoke name="f"><parameter name="city">Paris</parameter></invoke></function_calls>"""
    return ToolFormat(
        body=tagged_call,
        sections=sections,
        begin=(f'<{prefix}invoke name="',),
        header=rf"{_NAME}\"\s*>",
        parameter=(f'<{prefix}parameter name="', ('">',), (f"</{prefix}parameter>",)),
        end=(f"</{prefix}invoke>", *end),
    )


_DEEPSEEK = ToolFormat(
    body=json_calls,
    sections=("<｜tool▁calls▁begin｜>",),
    begin=("<｜tool▁call▁begin｜>",),
    header=rf"(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>)?\s*(?:```json)?",
    end=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_GLM = ToolFormat(
    body=tagged_call,
    begin=("<tool_call>",),
    header=_NAME,
    parameter=("<arg_key>", ("<arg_value>",), ("</arg_value>",)),
    end=("</tool_call>",),
)

TOOLS: dict[str, ToolFormat] = {
    **dict.fromkeys(("hermes", "ernie45", "granite4"), _json("<tool_call>", "</tool_call>")),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "step3p5"), _functions("tool_call")),
    **dict.fromkeys(
        ("llama3_json", "llama4_json"),
        ToolFormat(body=json_calls, begin=("<|python_tag|>", "\n{"), bare="{", sign=_LLAMA),
    ),
    **dict.fromkeys(
        ("llama4_pythonic", "pythonic"),
        ToolFormat(
            body=pythonic_calls, begin=("<|python_start|>",), end=("<|python_end|>",), bare="[", sign="[func_name1("
        ),
    ),
    "mistral": ToolFormat(
        body=json_calls,
        begin=("[TOOL_CALLS]",),
        header=r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?",
    ),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), _DEEPSEEK),
    "deepseek_v32": _invoke(("<｜DSML｜function_calls>",), ("</｜DSML｜function_calls>",), "｜DSML｜"),
    "deepseek_v4": _invoke(("<｜DSML｜tool_calls>",), ("</｜DSML｜tool_calls>",), "｜DSML｜"),
    **dict.fromkeys(("glm45", "glm47"), _GLM),
    "kimi_k2": ToolFormat(
        body=json_calls,
        sections=("<|tool_calls_section_begin|>",),
        begin=("<|tool_call_begin|>",),
        header=r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*(?:<\|tool_call_argument_begin\|>)?",
        end=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "openai": ToolFormat(whole=harmony, sign="<|channel|>"),
    "minimax_m2": _invoke(("<minimax:tool_call>",), ("</minimax:tool_call>",)),
    "seed_oss": _functions("seed:tool_call"),
    "step3": _invoke(
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        "steptml:",
    ),
    "gigachat3": ToolFormat(body=json_calls, begin=("function call<|role_sep|>", "function call")),
    "granite": ToolFormat(
        body=json_calls, begin=("<|tool_call|>", "<tool_call>"), end=("</tool_call>",), bare="[", sign="<|tool_call|>"
    ),
    "granite-20b-fc": _json("<function_call>"),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), _json("<tool_calls>", "</tool_calls>")),
    "internlm": _json("<|action_start|><|plugin|>", "<|action_end|>"),
    "lfm2": ToolFormat(body=pythonic_calls, begin=("<|tool_call_start|>",), end=("<|tool_call_end|>",)),
    "longcat": _json("<longcat_tool_call>", "</longcat_tool_call>"),
    "olmo3": ToolFormat(body=pythonic_calls, begin=("<function_calls>",), end=("</function_calls>",)),
    "phi4_mini_json": _json("functools"),
    "xlam": ToolFormat(
        body=json_calls, begin=("[TOOL_CALLS]", "<tool_call>", "```json"), end=("</tool_call>", "```"), bare="[{"
    ),
}
