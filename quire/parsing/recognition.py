"""Which parsers a model needs, from the markers in its chat template."""

from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from quire.parsing.suffixes import suffix_in


def recognized(chat_template: str) -> tuple[str | None, str | None]:
    """(name of the reasoning parser, name of the tool parser) for a chat template, None where its markers tell none.

    A format is recognized if all of its markers occur in the template. Of several, the one with most of them counts.
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
    """The name of the format with the most markers, all of which are in the template."""
    names = [name for name, markers in formats.items() if all(marker in template for marker in markers)]
    return max(names, key=lambda name: (len("".join(formats[name])), name == preferred), default=None)
