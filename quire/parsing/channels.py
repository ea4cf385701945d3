"""Formats in which an answer is a sequence of messages, whose kind follows from a marker or a recipient.

Muse: to=self<|message|>...<|eom|><|start|>assistant to=weather<|message|><atem:invoke name="weather">...<|eom|>
<|start|>assistant to=user<|message|>...<|eot|>
Inkling: <|content_thinking|>...<|end_message|><|message_model|><|content_invoke_tool_json|>{"name": ..., "args": ...}
<|end_message|><|message_model|><|content_text|>...<|end_message|>
"""

from collections.abc import Callable, Mapping

from quire.parsing.calls import ToolFormat, Types, json_calls, tagged_call
from quire.parsing.events import Reasoning
from quire.parsing.reader import Reader, Steps

_MUSE_ENDS = ("<|eom|>", "<|eot|>", "<|start|>assistant")
_MUSE_HEADERS = (" to=", "\nto=", "<|message|>")
_ATEM = ToolFormat(
    sections=("<atem:function_calls>", "</atem:function_calls>"),
    begin=('<atem:invoke name="',),
    # A tool without a namespace is called by its name twice: now.now
    header=r'(?:(?P<twice>[^\s<>".]+)\.(?=(?P=twice)"))?(?P<name>[^\s<>"]+)"\s*>',
    parameter=('<atem:parameter name="', ('">',), ("</atem:parameter>", *_MUSE_ENDS)),
    end=("</atem:invoke>", *_MUSE_ENDS),
)

_INKLING_MESSAGE = "<|message_model|>"
_INKLING_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_INKLING_TOOL = "<|content_invoke_tool_json|>"
_INKLING_THINKING = "<|content_thinking|>"
_INKLING_KINDS = (
    _INKLING_THINKING,
    "<|content_text|>",
    _INKLING_TOOL,
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
)
_INKLING_CALL = ToolFormat(arguments=("args", "arguments", "parameters"))


def muse(reader: Reader, types: Types) -> Steps[None]:
    """Reads an answer of Muse Spark. Messages without a recipient are reasoning."""
    think = _thinking(reader)
    show = reader.content
    channels = {"": think, "self": think, "user": show, "commentary": show, "developer": lambda text: None}
    yield from _muse(reader, types, channels)


def muse_glimmer(reader: Reader, types: Types) -> Steps[None]:
    """Reads an answer of Muse Glimmer. Messages without a recipient are content."""
    yield from _muse(reader, types, {"": reader.content, "self": _thinking(reader), "user": reader.content})


def inkling(reader: Reader, types: Types) -> Steps[None]:
    """Reads an answer of Inkling, which begins after the marker of its first message."""
    marker: str | None = _INKLING_MESSAGE
    while marker is not None:
        say: Callable[[str], None] = reader.content
        reader.hold("", marker == _INKLING_MESSAGE)
        if marker == _INKLING_MESSAGE:
            yield from reader.space()
            yield from reader.word()  # a name that clients do not need
            yield from reader.space()
            if (yield from reader.before(_INKLING_KINDS, 0)):
                reader.discard()
            reader.give_up()
        elif marker == _INKLING_TOOL:
            reader.hold(marker, True)
            yield from json_calls(reader, _INKLING_CALL, types)
            reader.give_up()
        elif marker == _INKLING_THINKING:
            say = _thinking(reader)
        marker = yield from reader.until((_INKLING_MESSAGE, *_INKLING_KINDS, *_INKLING_ENDS), say)
    reader.end()


def kept_thinking(reader: Reader, types: Types) -> Steps[None]:
    """Reads an answer whose thinking stays in the content, and adds the start marker if it is missing."""
    yield from reader.literal("<think>")
    reader.hold("<think>", False)
    while (yield from reader.until((), reader.content)):
        pass
    reader.end()


def _muse(reader: Reader, types: Types, channels: Mapping[str, Callable[[str], None]]) -> Steps[None]:
    """Reads messages. channels: the handler of the text for each recipient; all other recipients are tools."""
    say: Callable[[str], None] = reader.content
    marker = "to=" if (yield from reader.literal("to=")) else (yield from _muse_calls(reader, types))
    while marker is not None:
        name = (yield from reader.word()) if marker.endswith("to=") else ""
        if marker in _MUSE_ENDS:
            say = reader.content
            reader.hold("", False)
        elif marker != "<|message|>" and not (yield from reader.literal("<|message|>")):
            say(marker + name)
        else:
            reader.discard()
            if name not in channels:
                marker = yield from _muse_calls(reader, types)
                continue
            say = channels[name]
        marker = yield from reader.until((*_MUSE_ENDS, *_MUSE_HEADERS), say)
    reader.end()


def _muse_calls(reader: Reader, types: Types) -> Steps[str | None]:
    """Reads a message to a tool, up to the marker after it, which is returned."""
    markers = (*_ATEM.begin, *_ATEM.sections)
    while (marker := (yield from reader.until((*markers, *_MUSE_ENDS, *_MUSE_HEADERS), reader.content))) in markers:
        if marker in _ATEM.begin:
            reader.hold(marker, True)
            yield from tagged_call(reader, _ATEM, types)
            reader.give_up()
    return marker


def _thinking(reader: Reader) -> Callable[[str], None]:
    return lambda text: reader.events.append(Reasoning(text))
