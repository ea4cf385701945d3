"""docs/command-line.md: its tables list the commands, and what can be typed in a conversation."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from quire.cli import chat
from quire.cli.main import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """The first cells of the first table behind a heading."""
    table = PAGE.split(heading, 1)[1].lstrip().split("\n\n")[0]
    return [line.split("|")[1] for line in table.splitlines()[2:]]


def test_all_commands_are_in_the_table():
    parser = build_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    listed = {
        name for cell in first_cells("# The command line\n") for name in re.findall(r"`(?:quire )?([\w-]+)`", cell)
    }
    assert listed == set(commands.choices)


def test_what_can_be_typed_in_a_conversation_is_in_the_table():
    listed = {name for cell in first_cells("## quire chat\n") for name in re.findall(r"(/\w+)", cell)}
    assert listed - {"/exit"} == set(re.findall(r"^  (/\w+)", chat._COMMANDS, re.MULTILINE))
