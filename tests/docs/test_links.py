"""Links of README and docs lead to files and headings that exist. Nothing is asked of the internet."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.documents import DOCUMENTS, ROOT, anchors, links, name_of


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path):
    assert [problem for target in links(path) if (problem := problem_of(target, path))] == []


def problem_of(target: str, path: Path) -> str:
    """What is wrong with a link of a document, or nothing."""
    address = urlsplit(target)
    if address.scheme:
        is_whole = address.scheme in ("http", "https") and "." in address.netloc.rstrip(".") and " " not in target
        return "" if is_whole else f"{target} is no address"
    file = Path(os.path.normpath(path.parent / address.path)) if address.path else path
    if not file.is_relative_to(ROOT):
        return f"{target} leads out of the repository"
    if not file.exists():
        return f"{target} does not exist"
    if address.fragment and (file.suffix != ".md" or address.fragment not in anchors(file)):
        return f"{target}: no such heading"
    return ""


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("README.md", ""),
        ("docs/serving.md#no-such-heading", "no such heading"),
        ("docs/missing.md", "does not exist"),
        ("../elsewhere.md", "leads out"),
        ("https://", "no address"),
        ("https://example.com/page#part", ""),
    ],
)
def test_a_link_that_leads_nowhere_is_found(target: str, problem: str):
    found = problem_of(target, ROOT / "README.md")
    assert problem in found
    assert bool(found) is bool(problem)


def test_headings_have_the_anchors_of_github(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `code`, and more\n\n## Batch  invariance\n\n## Notes\n\n## Notes\n\n```\n# no heading\n```\n")
    assert anchors(page) == {"a-code-and-more", "batch--invariance", "notes", "notes-1"}
