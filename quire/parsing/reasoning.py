"""The reasoning formats in reasoning.toml, by vLLM's names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.parsing.calls import Types
from quire.parsing.channels import inkling, kept_thinking, muse, muse_glimmer
from quire.parsing.events import Content, Parser, Reasoning
from quire.parsing.filters import Filter, Filtered, line_breaks, without_citations
from quire.parsing.harmony import harmony
from quire.parsing.reader import Parsing, Reader, Steps
from quire.parsing.tables import formats
from quire.parsing.values import parameter_types

_BEFORE_START = ("", "\n", "\n\n", " ")


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family of models marks its thinking.

    start, end: markers around it; if there are several spellings, the usual one comes first.
    starts_inside: the answer begins within thinking, unless the prompt's end shows otherwise.
    starts_anywhere: thinking may also begin within the answer.
    closing: the text that ends thinking when its budget is used up; "" if it is end[0].
    implicit_ends: the beginnings of tool calls, which end the thinking without its marker. Formats with them also drop
        misplaced markers: a start within thinking, and an end outside of thinking and calls.
    ends_for_tools: implicit_ends end the thinking only if the request has tools.
    trims: white space at the end of the thinking is dropped.
    on_lines: a line break next to a marker belongs to the marker.
    wrapper: markers around the answer, which are dropped.
    promotes: if the request's chat_template_kwargs set force_nonempty_content, thinking without an answer also becomes
        the answer.
    needs_special_tokens: the markers are special tokens, which must not be skipped in the text.
    whole: reads whole answers, for a format that combines reasoning and calls.
    sign: text that identifies the format in a chat template, if the template does not contain the exact markers.
    filter: changes the thinking and the content.
    is_suffixed: checkpoints may append a suffix to the names of their markers, as in <think:abc>.
    """

    start: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    starts_inside: bool = False
    starts_anywhere: bool = False
    closing: str = ""
    implicit_ends: tuple[str, ...] = ()
    ends_for_tools: bool = False
    trims: bool = False
    on_lines: bool = False
    wrapper: tuple[str, ...] = ()
    promotes: bool = False
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

    def is_promoted(self, template_arguments: Mapping[str, Any]) -> bool:
        """Whether thinking without an answer is also sent as the answer, as chat_template_kwargs may request."""
        return self.promotes and template_arguments.get("force_nonempty_content") is True

    def make(
        self, is_open: bool, calls_end: bool = True, is_promoted: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Parser:
        """Return a parser of one answer, which may begin within thinking. calls_end: whether implicit_ends and
        starts_anywhere apply. is_promoted: see the method. tools: the definitions in the request
        """
        if self.whole:
            parser = Parsing(self.whole, parameter_types(tools))
            parser.feed(self.start[0] if is_open else "")
            return parser
        format = self if calls_end else msgspec.structs.replace(self, implicit_ends=(), starts_anywhere=False)
        parser = Parsing(read_reasoning, format, is_open, is_promoted)
        return Filtered(parser, self.filter) if self.filter else parser


def read_reasoning(reader: Reader, format: ReasoningFormat, is_thinking: bool, is_promoted: bool) -> Steps[None]:
    """Reads an answer that may begin with thinking."""
    thoughts = _Thoughts(reader, format.trims)
    content = _Answer(reader, is_promoted)
    starts, ends, wrapper = (
        _with_line_breaks(markers) if format.on_lines else markers
        for markers in (format.start, format.end, format.wrapper)
    )
    if start := (yield from reader.before(tuple(space + start for space in _BEFORE_START for start in starts), 0)):
        is_thinking = yield from reader.literal(start[1])
    strays = ends if format.implicit_ends else ()
    inner_starts = starts if format.implicit_ends else ()
    later_starts = starts if format.starts_anywhere else ()
    marker: str | None = ""
    while marker is not None and marker not in format.implicit_ends:
        if is_thinking:
            marker = yield from reader.until((*ends, *format.implicit_ends, *inner_starts), thoughts.add)
            is_thinking = marker in inner_starts
        else:
            markers = (*wrapper, *strays, *later_starts, *format.implicit_ends)
            marker = yield from reader.until(markers, content.add)
            is_thinking = marker in later_starts
    if marker:  # a call follows, in which markers are ignored
        content.add(marker)
        yield from reader.until((), content.add)
    if is_promoted and content.is_empty and thoughts.text:
        reader.events.append(Content(thoughts.text))


class _Thoughts:
    """Emit the thinking. White space at its end is held back, and dropped if the format trims it."""

    def __init__(self, reader: Reader, trims: bool) -> None:
        self._reader = reader
        self._trims = trims
        self._space: list[str] = []
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        kept = text.rstrip() if self._trims else text
        if kept:
            self._pieces.append("".join((*self._space, kept)))
            self._reader.events.append(Reasoning(self._pieces[-1]))
            self._space = []
        self._space.append(text[len(kept) :])

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class _Answer:
    """Emit the content. White space before it is held back if thinking should replace empty content."""

    def __init__(self, reader: Reader, holds_space: bool) -> None:
        self._reader = reader
        self._held: list[str] | None = [] if holds_space else None
        self.is_empty = True

    def add(self, text: str) -> None:
        self.is_empty = self.is_empty and not text.strip()
        if self._held is not None:
            self._held.append(text)
            if self.is_empty:
                return
            text = "".join(self._held)
            self._held = None
        if text:
            self._reader.events.append(Content(text))


def _with_line_breaks(markers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(before + marker + behind for marker in markers for before in ("", "\n") for behind in ("", "\n"))


_WHOLE = (harmony, inkling, kept_thinking, muse, muse_glimmer)
REASONING: dict[str, ReasoningFormat] = formats(__file__, ReasoningFormat, (*_WHOLE, line_breaks, without_citations))
