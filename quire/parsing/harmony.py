"""The format of gpt-oss: messages with a channel and, for tool calls, a recipient.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>, and for the answer <|channel|>final<|message|>...<|return|>
"""

import re

from quire.parsing.calls import Types
from quire.parsing.events import Reasoning
from quire.parsing.reader import Reader, Steps

_HEADERS = ("<|channel|>", "<|start|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", *_HEADERS)
_LONGEST_HEADER = 300  # characters
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


def harmony(reader: Reader, types: Types) -> Steps[None]:
    """Reads an answer. Reasoning and tool calls are in the same stream, so no second parser is needed. Arguments are
    JSON, and need no types."""
    reader.hold("", True)
    yield from reader.space()
    marker: str | None = "to=" if (yield from reader.literal("to=")) else ""  # a recipient may precede the channel
    while marker is not None:
        if marker not in ("to=", *_HEADERS):
            reader.give_up()
            marker = yield from reader.until(_HEADERS, reader.content)
        elif found := (yield from reader.before(("<|message|>",), _LONGEST_HEADER)):
            yield from reader.literal("<|message|>")
            if reader.is_attempt:
                reader.discard()
            marker = yield from _message(reader, marker + found[0])
        else:
            if marker != "to=":
                reader.content(marker)
            marker = ""
    reader.end()


def _message(reader: Reader, header: str) -> Steps[str | None]:
    """Reads the text of a message up to a marker, which is returned."""
    recipient = _RECIPIENT.search(header)
    if recipient and recipient[1]:
        reader.call(recipient[2])
        is_empty = (yield from reader.space()) == "<"
        marker = yield from reader.until(_ENDS, reader.arguments)
        if marker and is_empty:
            reader.arguments("{}")
    elif _ANALYSIS.search(header) or (recipient and "<|channel|>final" not in header):  # also calls of built-in tools
        marker = yield from reader.until(_ENDS, lambda text: reader.events.append(Reasoning(text)))
    else:
        marker = yield from reader.until(_ENDS, reader.content)
    return marker
