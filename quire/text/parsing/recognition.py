"""Which parsers a model needs, from the markers in its chat template."""

# Markers that all occur in the template → the name of the parser. The first row that fits counts.
_TOOLS = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("steptml:invoke",), "step3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|action_start|>",), "internlm"),
    (("functools[",), "phi4_mini_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<tool_call>",), "hermes"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_REASONING = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process:",), "granite"),
    (("</think>", "<｜Assistant｜>", "thinking"), "deepseek_v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "steptml:invoke"), "step3"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>",), "qwen3"),
)


def recognized(chat_template: str) -> tuple[str | None, str | None]:
    """(name of the reasoning parser, name of the tool parser) for a chat template, None where its markers tell none."""

    def first(rows: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
        return next((name for markers, name in rows if all(marker in chat_template for marker in markers)), None)

    return first(_REASONING), first(_TOOLS)
