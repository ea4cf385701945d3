"""Formats of tool calls and thinking that the operator names."""

import sys
from types import SimpleNamespace

import pytest

from quire.config.engine import ConfigError
from quire.engine.frontend import chosen_parser
from quire.parsing.calls import ToolFormat, json_calls
from quire.parsing.formats import TOOLS
from support.parsing import parse


def test_a_format_may_be_given_by_its_import_path(monkeypatch: pytest.MonkeyPatch):
    calls = ToolFormat(body=json_calls, begin=("<call>",), end=("</call>",))
    monkeypatch.setitem(sys.modules, "my_formats", SimpleNamespace(CALLS=calls, OTHER=3))
    known = dict(TOOLS)
    for path in ("my_formats.CALLS", "my_formats:CALLS"):
        assert chosen_parser("tool_call_parser", path, "hermes", known) == path
        assert parse(known[path].make, ['<call>{"name": "f"}</call>']).calls == [("f", "{}")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_formats.OTHER", "must be a ToolFormat, not of type int"),
        ("my_formats.NONE", "cannot be imported"),
        ("no_such_module.CALLS", "cannot be imported"),
        ("zeus", "must be none or one of .*hermes.*"),
    ],
)
def test_a_name_that_is_no_format_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, reason: str):
    monkeypatch.setitem(sys.modules, "my_formats", SimpleNamespace(OTHER=3))
    with pytest.raises(ConfigError, match=f"tool_call_parser .*{reason}"):
        chosen_parser("tool_call_parser", name, None, dict(TOOLS))
