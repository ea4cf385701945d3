"""The formats of reasoning, by the names that vLLM gives them."""

from collections.abc import Callable

import msgspec

from quire.text.parsing.events import Content, Parser, Reasoning
from quire.text.parsing.harmony import harmony
from quire.text.parsing.reader import Parsing, Reader, Steps


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models marks its thinking.

    start, end: markers around it, where there are several spellings the usual one first
    starts_inside: the answer begins within thinking, unless the prompt's end says otherwise
    closing: the text that ends thinking when its budget is used up; "" if it is end[0]
    implicit_ends: texts with which a tool call begins, and which end the thinking without its marker
    wrapper: markers around the answer, which are left out
    needs_special_tokens: the markers are special tokens, which must not be left out of the text
    whole: reads whole answers, for a format in which reasoning and calls are one
    """

    start: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    starts_inside: bool = False
    closing: str = ""
    implicit_ends: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    needs_special_tokens: bool = False
    whole: Callable[[Reader], Steps[None]] | None = None

    def is_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within thinking."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.start):
            return True
        return self.starts_inside and not prompt.endswith(self.end)

    def make(self, is_open: bool) -> Parser:
        """A parser of one answer, which begins within thinking or not."""
        return Parsing(self.whole) if self.whole else Parsing(read_reasoning, self, is_open)


def read_reasoning(reader: Reader, format: ReasoningFormat, is_open: bool) -> Steps[None]:
    """Reads an answer that may begin with thinking."""

    def say(event: type[Reasoning] | type[Content], text: str) -> None:
        if text:
            reader.events.append(event(text))

    starts = tuple(space + start for space in ("", "\n", "\n\n", " ") for start in format.start)
    start = yield from reader.before(starts, 0)
    if start:
        yield from reader.literal(start[1])
    if start or is_open:
        marker = yield from reader.until((*format.end, *format.implicit_ends), lambda text: say(Reasoning, text))
        if marker in format.implicit_ends:
            say(Content, marker)
    while (yield from reader.until(format.wrapper, lambda text: say(Content, text))):
        pass


_THINK = ReasoningFormat()
_INSIDE = ReasoningFormat(starts_inside=True)

REASONING: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(implicit_ends=("<tool_call>\n<function=",)),
    "deepseek_r1": _INSIDE,
    **dict.fromkeys(("deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "mimo"), _THINK),
    **dict.fromkeys(("minimax_m2", "nemotron_v3", "olmo3", "step3", "step3p5"), _INSIDE),
    "kimi_k2": ReasoningFormat(implicit_ends=("<|tool_calls_section_begin|>",)),
    "ernie45": ReasoningFormat(starts_inside=True, wrapper=("<response>", "</response>")),
    "hunyuan_a13b": ReasoningFormat(wrapper=("<answer>", "</answer>")),
    "granite": ReasoningFormat(
        start=("Here is my thought process:", "Here's my thought process:"),
        end=("Here is my response:", "Here's my response:"),
    ),
    "seed_oss": ReasoningFormat(start=("<seed:think>",), end=("</seed:think>",), starts_inside=True),
    "mistral": ReasoningFormat(start=("[THINK]",), end=("[/THINK]",), needs_special_tokens=True),
    "openai_gptoss": ReasoningFormat(
        start=("<|channel|>analysis<|message|>",),
        end=("<|channel|>final<|message|>",),
        closing="<|end|><|start|>assistant<|channel|>final<|message|>",
        needs_special_tokens=True,
        whole=harmony,
    ),
}
