"""The names of parsers that vLLM 0.33 knows, and that docs/tools-and-reasoning.md is about."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire_parsing.formats import TOOLS
from quire_parsing.reasoning import REASONING

_HERE = Path(__file__)
_NAMES = tomllib.loads(_HERE.with_name("vllm_names.toml").read_text(encoding="utf-8"))
_PAGE = (_HERE.parents[2] / "docs" / "tools-and-reasoning.md").read_text(encoding="utf-8")
_MISSING = {"beam", "hf"}  # they read a `response_template` of the checkpoint


@pytest.mark.parametrize(("option", "known"), [("tool_call_parser", TOOLS), ("reasoning_parser", REASONING)])
def test_every_name_of_vllm_is_known_or_named_as_missing(option: str, known: Iterable[str]):
    assert set(_NAMES[option]) - set(known) == _MISSING
    assert re.findall(r"`(\w+)`", _paragraph("vLLM's parsers")) == sorted(_MISSING)


def test_the_page_names_every_format():
    named = set(re.findall(r"`([\w-]+)`", _PAGE))
    assert ({*TOOLS} | {*REASONING}) - named == set()


def _paragraph(beginning: str) -> str:
    return next(paragraph for paragraph in _PAGE.split("\n\n") if paragraph.startswith(beginning))
