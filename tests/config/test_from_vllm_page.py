"""docs/from-vllm.md: its lists of options and fields are those of the code, and are written by `pytest ... --write`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

import quire
from quire.config.engine import GROUPS, OPTIONS, ServerConfig, canonical_name
from quire.config.vllm import (
    FIELD_FLAGS,
    IMPLIED,
    NO_EFFECT,
    NOT_SUPPORTED,
    RETIRED,
    SPECULATIVE_NO_EFFECT,
    SPECULATIVE_NOT_SUPPORTED,
    UNSUPPORTED_VALUES,
    VALUES,
)
from quire.messages.sampling_params import SamplingParams
from quire.server import adapters, admin_routes, chat, completions, control, text_routes, transcriptions
from quire.server.protocol import UNSUPPORTED, UNSUPPORTED_IN_CHAT, WITHOUT_EFFECT, ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"
WRITTEN = "<!-- written by tests/config/test_from_vllm_page.py --write: {} -->\n"
END = "<!-- end -->\n"
DECLARED = {name: option for config in (*GROUPS.values(), ServerConfig) for name, option in OPTIONS[config].items()}


def flag(name: str) -> str:
    return "`--" + name.replace("_", "-") + "`"


def item(head: str, names: Iterable[str]) -> str:
    return textwrap.fill(f"- {head}{', '.join(names)}", 120, subsequent_indent="  ", break_on_hyphens=False)


def not_supported() -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, foreign in NOT_SUPPORTED.items():
        values = [json.dumps(value) for value in foreign.accepted or () if value is not False]
        shown = flag(name) + (f" ({' or '.join(f'`{value}`' for value in values)})" if values else "")
        groups.setdefault(f"{foreign.reason}: ", []).append(shown)
    return [item(head, sorted(names)) for head, names in sorted(groups.items(), key=lambda group: group[0].lower())]


def no_effect() -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, foreign in NO_EFFECT.items():
        if name not in DECLARED:  # else it is the server's, and means nothing to LLM(...)
            groups.setdefault(f"{foreign.reason}: ", []).append(flag(name))
    return [item(head, sorted(names)) for head, names in sorted(groups.items(), key=lambda group: group[0].lower())]


def retired() -> list[str]:
    return [
        item(f"{flag(name)}: ", [f"{flag(successor)}, {meaning}" if successor else f"no effect; {meaning}"])
        for name, (successor, meaning) in sorted(RETIRED.items())
    ]


def spellings() -> list[str]:
    return [
        item(
            f"{flag(name)}: ",
            [f"`{ours}` for `{theirs}`" for theirs, ours in sorted(values.items(), key=str) if str(ours) != theirs],
        )
        for name, values in sorted(VALUES.items())
    ]


def values_not_supported() -> list[str]:
    return [
        item(f"{flag(name)}: ", [f"`{value}`" for value in sorted(values)])
        for name, values in sorted(UNSUPPORTED_VALUES.items())
    ]


def flags_of_fields() -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, (option, field) in FIELD_FLAGS.items():
        groups.setdefault(f"`{field}` of {flag(option)}", []).append(flag(name))
    return [item(f"{field}: ", names) for field, names in groups.items()]


def implied() -> list[str]:
    return [
        item(f"{flag(name)} {json.dumps(value)}: ", [f"{flag(o)} {json.dumps(v)}" for o, v in options.items()])
        for name, values in IMPLIED.items()
        for value, options in values.items()
    ]


def speculative_fields() -> list[str]:
    groups: dict[str, list[str]] = {}
    for name, foreign in SPECULATIVE_NO_EFFECT.items():
        groups.setdefault(f"without effect, since {foreign.reason}: ", []).append(f"`{name}`")
    for name, foreign in SPECULATIVE_NOT_SUPPORTED.items():
        groups.setdefault(f"refused: {foreign.reason}: ", []).append(f"`{name}`")
    return [item(head, names) for head, names in groups.items()]


def refused_fields() -> list[str]:
    in_chat = set(UNSUPPORTED_IN_CHAT) - set(UNSUPPORTED)
    return [
        item("completions and chats: ", [f"`{name}`" for name in sorted(UNSUPPORTED)]),
        item("chats: ", [f"`{name}`" for name in sorted(in_chat)]),
    ]


def fields_without_effect() -> list[str]:
    return [item("", [f"`{name}`" for name in sorted(WITHOUT_EFFECT)])]


SECTIONS = {
    "not supported": not_supported,
    "no effect": no_effect,
    "retired": retired,
    "spellings": spellings,
    "values not supported": values_not_supported,
    "flags of fields": flags_of_fields,
    "implied": implied,
    "speculative fields": speculative_fields,
    "refused fields": refused_fields,
    "fields without effect": fields_without_effect,
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_list_of_the_page_is_that_of_the_code(name, request: pytest.FixtureRequest):
    text = PAGE.read_text()
    pattern = re.compile(f"(?<={re.escape(WRITTEN.format(name))}).*?(?={re.escape(END)})", re.DOTALL)
    found = pattern.search(text)
    assert found
    made = "\n" + "\n".join(SECTIONS[name]()) + "\n\n"
    if request.config.getoption("--write"):
        PAGE.write_text(pattern.sub(lambda _: made, text, count=1))
    else:
        assert found[0] == made, "docs/from-vllm.md is not what the code does: run this test with --write"


def absent(name: str) -> list[str]:
    [listed] = re.findall(rf"<!-- absent: {name} -->\n(.*?){END}", PAGE.read_text(), re.DOTALL)
    return re.findall(r"`([^`]+)`", listed)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table behind a heading."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def flags_in(cell: str) -> list[str]:
    return [canonical_name(name) for name in re.findall(r"--([a-z0-9-]+)", cell)]


def test_other_defaults_are_those_of_the_code():
    for option, theirs, ours in rows("Other defaults"):
        name = flags_in(option)[0]
        assert theirs != ours
        field = DECLARED[name]
        default = field.default_factory() if isinstance(field.default_factory, type(list.copy)) else field.default
        if default is not None and "auto" not in option:
            assert str(default) == ours or list(getattr(ServerConfig(), name, ours)) == json.loads(ours), option


def test_options_with_other_meanings_and_of_quires_own_are_declared():
    for cells in (*rows("Other meanings"), *rows("Options that vLLM does not have")):
        for name in flags_in(cells[0]):
            assert name in DECLARED or name in ("log_level", "compilation_config"), name
            assert name not in NOT_SUPPORTED, name
            assert name not in NO_EFFECT, name


def test_endpoints_that_are_said_to_be_absent_are():
    modules = (adapters, admin_routes, chat, completions, control, text_routes, transcriptions)
    served = {route.path for module in modules for route in module.router.routes}
    assert len(absent("endpoints")) > 10
    assert not served & set(absent("endpoints"))


def test_what_is_said_to_be_absent_in_python_is():
    assert len(absent("names in Python")) > 10
    for name in absent("names in Python"):
        owner, _, attribute = name.rpartition(".")
        assert not hasattr({"LLM": quire.LLM, "AsyncLLM": quire.AsyncLLM, "": quire}[owner], attribute), name


def test_sampling_parameters_that_are_said_to_be_absent_are():
    assert not set(absent("sampling parameters")) & set(SamplingParams.__struct_fields__)


def test_no_refused_field_is_one_that_is_read():
    assert not set(UNSUPPORTED) & set(CompletionRequest.model_fields)
    assert not set(UNSUPPORTED_IN_CHAT) & set(ChatRequest.model_fields)
    assert not WITHOUT_EFFECT & (set(CompletionRequest.model_fields) | set(ChatRequest.model_fields))


def test_the_page_is_wrapped():
    lines = PAGE.read_text().splitlines()
    assert all(len(line) <= 120 or line.startswith("|") for line in lines)
