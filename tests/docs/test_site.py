"""The documentation site: it is built in an environment of its own, all links in it work, and it loads nothing from
elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support.client_environment import client_python
from support.documents import ROOT

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [client_python(*packages), "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert build.returncode == 0, build.stderr
    return folder


class Page(HTMLParser):
    """links: of anchors. assets: what a browser loads to show the page. names: that anchors may lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.assets, self.names = list[str](), list[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif tag in ("script", "img", "iframe", "source"):
            self.assets += [given["src"]] if "src" in given else []
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.assets += [given["href"]]


def test_its_links_and_pictures_lead_somewhere(site: Path):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    problems = list[str]()
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of a server
        for target in {*page.links, *page.assets}:
            address = urlsplit(target)
            if address.scheme:
                continue
            file = path if not address.path else Path(os.path.normpath(path.parent / unquote(address.path)))
            file = file / "index.html" if file.is_dir() else file
            fragment = unquote(address.fragment)
            is_there = file.is_file() and (not fragment or file not in pages or fragment in pages[file].names)
            if not is_there and fragment != "__top":
                problems.append(f"{path.relative_to(site)}: {target}")
    assert problems == []


def test_it_loads_nothing_from_elsewhere(site: Path):
    for path in site.rglob("*.html"):
        assert [asset for asset in Page(path).assets if urlsplit(asset).scheme not in ("", "data")] == []
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", path.read_text(encoding="utf-8")), path


def test_it_has_the_api_and_the_code(site: Path):
    engines = (site / "reference" / "engines.html").read_text(encoding="utf-8")
    assert 'id="quire.engine.llm.LLM.generate"' in engines
    parameters = Page(site / "reference" / "parameters.html")
    assert "quire.messages.sampling_params.SamplingParams.temperature" in parameters.names
    assert (site / "repository" / "quire" / "scheduler" / "scheduler.py.html").is_file()
