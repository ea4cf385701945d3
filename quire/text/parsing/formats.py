"""The formats of tool calls, by the names that vLLM gives them."""

from quire.text.parsing.calls import (
    ToolFormat,
    headed_call,
    json_calls,
    json_or_headed_calls,
    pythonic_calls,
    tagged_call,
)
from quire.text.parsing.harmony import harmony

_NAME = r"\s*(?P<name>[^\s<>\"{｜]+)\s*"

_HERMES = ToolFormat(body=json_calls, begin=("<tool_call>",), end=("</tool_call>",))
_LLAMA_JSON = ToolFormat(body=json_calls, begin=("<|python_tag|>", "\n{"), bare="{")
_PYTHONIC = ToolFormat(
    body=pythonic_calls, begin=("<|python_start|>",), end=("<|python_end|>",), bare="[", needs_special_tokens=True
)
_DEEPSEEK = ToolFormat(
    body=headed_call,
    sections=("<｜tool▁calls▁begin｜>",),
    begin=("<｜tool▁call▁begin｜>",),
    header=rf"(?:\s*function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?:```)?",
    end=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
_QWEN_XML = ToolFormat(
    body=tagged_call,
    sections=("<tool_call>",),
    begin=("<function=",),
    header=rf"{_NAME}>\s*",
    parameter=("<parameter=", (">\n", ">"), ("\n</parameter>", "</parameter>", "\n<parameter=", "\n</function>")),
    end=("</function>", "</tool_call>"),
)
_GLM = ToolFormat(
    body=tagged_call,
    begin=("<tool_call>",),
    header=_NAME,
    parameter=("<arg_key>", ("<arg_value>",), ("</arg_value>",)),
    end=("</tool_call>",),
)


def _invoke(sections: tuple[str, ...], section_ends: tuple[str, ...], prefix: str = "") -> ToolFormat:
    """Tags with names as attributes: <invoke name="f"><parameter name="city">Paris</parameter></invoke>."""
    return ToolFormat(
        body=tagged_call,
        sections=sections,
        begin=(f'<{prefix}invoke name="',),
        header=rf"{_NAME}\">\s*",
        parameter=(f'<{prefix}parameter name="', ('">',), (f"</{prefix}parameter>",)),
        end=(f"</{prefix}invoke>", *section_ends),
    )


TOOLS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "mimo": _QWEN_XML,
    "step3p5": _QWEN_XML,
    "seed_oss": ToolFormat(
        body=tagged_call,
        sections=("<seed:tool_call>",),
        begin=_QWEN_XML.begin,
        header=_QWEN_XML.header,
        parameter=_QWEN_XML.parameter,
        end=("</function>", "</seed:tool_call>"),
    ),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "olmo3": ToolFormat(body=pythonic_calls, begin=("<function_calls>",), end=("</function_calls>",)),
    "lfm2": ToolFormat(body=pythonic_calls, begin=("<|tool_call_start|>",), end=("<|tool_call_end|>",)),
    "mistral": ToolFormat(
        body=json_or_headed_calls,
        begin=("[TOOL_CALLS]",),
        header=r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*",
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _invoke(("<｜DSML｜function_calls>",), ("</｜DSML｜function_calls>",), "｜DSML｜"),
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": ToolFormat(
        body=headed_call,
        sections=("<|tool_calls_section_begin|>",),
        begin=("<|tool_call_begin|>",),
        header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*(?:<\|tool_call_argument_begin\|>)?\s*",
        end=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "minimax_m2": _invoke(("<minimax:tool_call>",), ("</minimax:tool_call>",)),
    "step3": _invoke(
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        "steptml:",
    ),
    "ernie45": _HERMES,
    "granite": ToolFormat(body=json_calls, begin=("<|tool_call|>", "<tool_call>"), end=("</tool_call>",), bare="["),
    "granite4": _HERMES,
    "granite-20b-fc": ToolFormat(body=json_calls, begin=("<function_call>",)),
    "hunyuan_a13b": ToolFormat(body=json_calls, begin=("<tool_calls>",), end=("</tool_calls>",)),
    "jamba": ToolFormat(body=json_calls, begin=("<tool_calls>",), end=("</tool_calls>",)),
    "internlm": ToolFormat(body=json_calls, begin=("<|action_start|><|plugin|>",), end=("<|action_end|>",)),
    "longcat": ToolFormat(body=json_calls, begin=("<longcat_tool_call>",), end=("</longcat_tool_call>",)),
    "phi4_mini_json": ToolFormat(body=json_calls, begin=("functools",)),
    "xlam": ToolFormat(
        body=json_calls, begin=("[TOOL_CALLS]", "<tool_call>", "```json"), end=("</tool_call>", "```"), bare="[{"
    ),
    "openai": ToolFormat(whole=harmony),
}
