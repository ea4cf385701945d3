"""Finds the parsers that a model needs, from the markers in its chat template."""

from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from quire.parsing.suffixes import suffix_in


def recognized(chat_template: str) -> tuple[str | None, str | None]:
    """Return (name of the reasoning parser, name of the tool parser) for a chat template, None if its markers match
    none.

    A format is recognized if all of its markers occur in the template. If several match, the one with the most markers
    is chosen.
    """
    if suffix := suffix_in([chat_template]):
        chat_template = chat_template.replace(f"{suffix}>", ">")
    tools = {
        name: (format.sign,) if format.sign else (*format.sections, *format.begin, format.parameter[0])
        for name, format in TOOLS.items()
    }
    tool = _best(tools, chat_template, None)
    reasoning = {
        name: (format.sign,) if format.sign else (format.end[0], *format.wrapper)
        for name, format in REASONING.items()
        if not format.starts_inside or name == tool
    }
    return _best(reasoning, chat_template, tool), tool


def _best(formats: dict[str, tuple[str, ...]], template: str, preferred: str | None) -> str | None:
    """Return the name of the format with the most markers among those whose markers are all in the template."""
    names = [name for name, markers in formats.items() if all(marker in template for marker in markers)]
    return max(names, key=lambda name: (len("".join(formats[name])), name == preferred), default=None)
