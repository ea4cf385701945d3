"""The limits that docs/security.md lists have the options and the defaults that it says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.config.engine import SchedulerConfig, ServerConfig
from support.documents import ROOT

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
DEFAULTS: dict[str, Any] = vars(ServerConfig()) | vars(SchedulerConfig())


def rows() -> list[tuple[str, str]]:
    """(option, the default beside it) of each limit that has an option."""
    found = list[tuple[str, str]]()
    for line in (ROOT / "docs" / "security.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4:
            options = re.findall(r"`--([a-z0-9-]+)`", cells[2])
            defaults = cells[1].split(", ") if len(options) > 1 else [cells[1]] * len(options)
            found += zip(options, defaults, strict=True)
    return found


NUMBERS = [
    (option, default)
    for option, default in rows()
    if re.fullmatch(r"[\d.]+( \w+)?", default) and option != "structured-outputs-config"
]


@pytest.mark.parametrize(("option", "default"), NUMBERS)
def test_a_limit_has_the_default_that_the_page_says(option, default):
    number, _, unit = default.partition(" ")
    assert DEFAULTS[option.replace("-", "_")] == float(number) * UNITS[unit]


@pytest.mark.parametrize("option", [option for option, default in rows() if default == "none"])
def test_a_limit_without_a_default_has_none(option):
    assert DEFAULTS[option.replace("-", "_")] is None


def test_options_in_the_text_exist():
    text = (ROOT / "docs" / "security.md").read_text()
    known = (ROOT / "quire" / "cli" / "options.toml").read_text()
    for option in set(re.findall(r"`--([a-z0-9-]+)`", text)):
        assert re.search(rf"^{option.replace('-', '_')} = ", known, re.M), option
