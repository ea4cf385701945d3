"""The plots of docs/mechanisms are those of their data, and each page shows its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.mechanisms.all import DATA, MECHANISMS, PICTURES, drawn

PAGES = Path(__file__).parents[2] / "docs" / "mechanisms"
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_plot_is_drawn_from_its_data(name: str):
    """Another release of matplotlib may round differently, and gives its version in comments."""
    made, kept = drawn(name), (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    hint = f"python -m benchmarks.mechanisms --draw {name}"
    assert NUMBER.sub("0", made) == NUMBER.sub("0", kept), hint
    numbers, others = ([float(number) for number in NUMBER.findall(text)] for text in (made, kept))
    assert numbers == pytest.approx(others, abs=0.5), hint


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_page_shows_its_plot_and_names_its_data(name: str):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f"](../images/mechanisms/{name}.svg)" in page
    assert f"](../../benchmarks/mechanisms/data/{name}.json)" in page
    assert (f"python -m benchmarks.mechanisms {name}" in page) is (MECHANISMS[name][0] is not None)
    assert len(page.splitlines()) <= 80


@pytest.mark.parametrize("name", MECHANISMS)
def test_names_of_code_are_in_the_files_that_they_link_to(name: str):
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for code, target in re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", page):
        text = (PAGES / target).read_text(encoding="utf-8")
        if not code.endswith(".py"):
            assert all(re.search(rf"\b(class|def) {part}\b", text) for part in code.split(".")) or code in target, code


def test_nothing_is_left_over():
    names = set(MECHANISMS)
    assert {path.stem for path in PAGES.glob("*.md")} == {*names, "index"}
    assert {path.stem for path in DATA.iterdir()} == {path.stem for path in PICTURES.iterdir()} == names


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["continuous-batching", "chunked-prefill", "scheduling-order", "preemption"])
def test_counts_are_the_same_on_every_machine(name: str):
    import json

    measure, _ = MECHANISMS[name]
    assert measure is not None
    assert json.loads(json.dumps(measure())) == json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
