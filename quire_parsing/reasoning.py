"""The formats of reasoning, which reasoning.toml lists, by the names that vLLM gives them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire_parsing.calls import Types
from quire_parsing.channels import inkling, kept_thinking, muse, muse_glimmer
from quire_parsing.events import Content, Parser, Reasoning
from quire_parsing.filters import Filter, Filtered, line_breaks, without_citations
from quire_parsing.harmony import harmony
from quire_parsing.reader import Parsing, Reader, Steps
from quire_parsing.tables import formats
from quire_parsing.values import parameter_types


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models marks its thinking.

    start, end: markers around it, where there are several spellings the usual one first
    starts_inside: the answer begins within thinking, unless the prompt's end says otherwise
    closing: the text that ends thinking when its budget is used up; "" if it is end[0]
    implicit_ends: texts with which a tool call begins, and which end the thinking without its marker
    wrapper: markers around the answer, which are left out
    needs_special_tokens: the markers are special tokens, which must not be left out of the text
    whole: reads whole answers, for a format in which reasoning and calls are one
    sign: text by which a chat template tells the format, if it does not hold its markers as they are
    filter: what is changed in the thinking and in the content
    is_suffixed: checkpoints may append a suffix to the names of their markers, as in <think:abc>
    """

    start: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    starts_inside: bool = False
    closing: str = ""
    implicit_ends: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    needs_special_tokens: bool = False
    whole: Callable[[Reader, Types], Steps[None]] | None = None
    sign: str = ""
    filter: Filter | None = None
    is_suffixed: bool = False

    def is_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within thinking."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.start):
            return True
        return self.starts_inside and not prompt.endswith(self.end)

    def make(self, is_open: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Parser:
        """A parser of one answer, which begins within thinking or not. tools: the definitions in the request"""
        if self.whole:
            parser = Parsing(self.whole, parameter_types(tools))
            parser.feed(self.start[0] if is_open else "")
            return parser
        parser = Parsing(read_reasoning, self, is_open)
        return Filtered(parser, self.filter) if self.filter else parser


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


_WHOLE = (harmony, inkling, kept_thinking, muse, muse_glimmer)
REASONING: dict[str, ReasoningFormat] = formats(__file__, ReasoningFormat, (*_WHOLE, line_breaks, without_citations))
