"""Every family of transformers, on a tiny checkpoint made by rules: it runs as recorded, without a wrong token.

A few families run each time, all of them nightly. `pytest -n0 -m "" tests/models/test_every_family.py --write` records
the outcomes (tests/data/every_family.jsonl) and writes the table of all architectures in docs/models.md.
"""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from quire.models.registry import ARCHITECTURES
from support.every_family import families, outcome, record, recorded, row_of
from support.every_family_page import BEGIN, END, ROOT, section, vllm_status

ROWS = recorded()
SLOW = {name for name, row in ROWS.items() if len(row.get("changes", ())) > 1 or row["runs"] == "unknown"}  # to make
PAGE = ROOT / "docs" / "models.md"


def cases() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in ROWS]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", cases())
def test_it_runs_as_recorded(tmp_path, request, name):
    family = next((family for family in families(name.partition(":")[2]) if family.name == name), None)
    if family is None:
        pytest.skip("this version of transformers has no such model")
    found = outcome(family, tmp_path)
    assert not found.wrong, f"{found.wrong} of {found.tokens} tokens are not those of transformers"
    assert found.tied <= found.tokens / 4, "too many ties to tell right from wrong"
    row = row_of(family, found)
    if request.config.getoption("--write"):
        record({**recorded(), name: row})
    elif row["transformers"] == ROWS[name]["transformers"]:
        assert {**row, "changes": None} == {**ROWS[name], "changes": None}
    else:
        assert found.runs == ROWS[name]["runs"]


@pytest.mark.nightly
def test_every_family_of_transformers_is_recorded(tmp_path_factory, request):
    """A new version of transformers brings new ones."""
    present = {family.name: family for family in families()}
    if request.config.getoption("--write"):
        made = {
            name: row_of(family, outcome(family, tmp_path_factory.mktemp("new")))
            for name, family in present.items()
            if name not in ROWS
        }
        record({**{name: row for name, row in recorded().items() if name in present}, **made})
    else:
        assert sorted(present) == sorted(ROWS), f"recorded with another version than {version('transformers')}"


def test_the_page_has_all_architectures(request):
    text = PAGE.read_text()
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.DOTALL)
    assert pattern.search(text)
    made = section(recorded().values())
    if request.config.getoption("--write"):
        PAGE.write_text(pattern.sub(lambda _: made, text))
    else:
        assert pattern.search(text)[0] == made, "docs/models.md is not what is recorded: run this with --write"


def test_what_the_registry_has_runs_natively():
    native = [name for name in ROWS if name.partition(":")[0] in ARCHITECTURES]
    assert [name for name in native if ROWS[name]["runs"] not in ("native", "encoder", "unknown")] == []


def test_vllms_status_is_that_of_its_registry():
    assert vllm_status("LlamaForCausalLM") == "yes"
    assert vllm_status("Starcoder2ForCausalLM") == "through transformers' code"
    assert vllm_status("BambaForCausalLM") == "removed"
    assert vllm_status("BigBirdForCausalLM") == "no"
