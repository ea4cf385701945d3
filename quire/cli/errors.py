"""Error texts for the command line: the engine names an option as Python does, a person typed a flag."""

import argparse
import re
from collections.abc import Iterator, Sequence

from quire.cli.flags import option_of


def with_flags(message: str, parser: argparse.ArgumentParser, argv: Sequence[str]) -> str:
    """The message with flags for the options that it names, spelled as they were typed.

    >>> "max_model_len=9000 is more than the 2048 positions of the model"
    "--max-model-len 9000 is more than the 2048 positions of the model"

    A name with an underscore is no English word, so it is replaced wherever it stands. Others, such as "port", are
    replaced where they are used as a name: before "=", "must" or "is not", or within quotes.
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
    """(option's name in Python, its flags, the usual one first) of each option of a command."""
    for action in parser._actions:  # argparse has no public way to list them
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        if flags:
            yield option_of(action.dest), [*flags, *(set(action.option_strings) - set(flags))]
