"""The names of parsers that vLLM 0.33 knows, and that docs/tools-and-reasoning.md is about."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING

_HERE = Path(__file__)
_NAMES = tomllib.loads(_HERE.with_name("vllm_names.toml").read_text(encoding="utf-8"))
_PAGE = (_HERE.parents[2] / "docs" / "tools-and-reasoning.md").read_text(encoding="utf-8")


def _missing() -> set[str]:
    """The names that the page says are missing."""
    found = re.search("vLLM's parsers (.*) are missing", _PAGE)
    return set(re.findall(r"`([\w-]+)`", found[1])) if found else set()


@pytest.mark.parametrize(("option", "known"), [("tool_call_parser", TOOLS), ("reasoning_parser", REASONING)])
def test_every_name_of_vllm_is_known_or_the_page_names_it_as_missing(option: str, known: Iterable[str]):
    assert set(_NAMES[option]) - set(known) == _missing()


def test_the_page_names_every_format():
    named = set(re.findall(r"`([\w-]+)`", _PAGE))
    assert ({*TOOLS} | {*REASONING}) - named == set()
