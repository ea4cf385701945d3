"""Error messages for the command line. The engine names options as in Python; users see the flags that they typed."""

import argparse
import re
from collections.abc import Iterator, Sequence

from quire.cli.flags import option_of


def with_flags(message: str, parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """Return the message with option names replaced by flags, as the user typed them.

    >>> "max_model_len=9000 is more than the 2048 positions of the model"
    "--max-model-len 9000 is more than the 2048 positions of the model"

    A name with an underscore is not an English word, so it is replaced everywhere. Other names, such as "port", are
    replaced only where they refer to the option: before "=", "must" or "is not supported", or within quotes.
    """
    typed = [argument.partition("=")[0] for argument in argv if argument.startswith("-")]
    for name, flags in _flags(parser):
        flag = next((written for written in typed if written.replace("_", "-") in flags), flags[0])
        spelled = re.escape(name)
        message = re.sub(rf"(?<![\w.-]){spelled}=(?:'([^']*)'|(?=\S))", rf"{flag} \1", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w.-])(['\"]?){spelled}\1(?![\w-])", flag, message)
        else:
            message = re.sub(rf"(?<![\w.-]){spelled}(?= must | is not supported)", flag, message)
            message = re.sub(rf"(?<=did you mean )'{spelled}'", flag, message)
    return message


def _flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """For each option of a command: its Python name, and its flags, the usual flag first."""
    for action in parser._actions:  # argparse has no public way to list actions
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if flags:
            yield option_of(action.dest), [*flags, *(set(action.option_strings) - set(flags))]
