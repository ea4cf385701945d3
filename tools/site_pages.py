"""A MkDocs hook: the README becomes the home page, and linked files outside docs/ become pages, too.

Links in the documents are paths in the repository, so they also work outside the site. In the site, a link to source
code leads to a page with that code, and a link to a folder to a list of its files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?P<before>\]\(|^\[[^\]\n]+\]: )(?P<target>[^)\s#]+)", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".cpp": "cpp", ".h": "cpp", ".sql": "sql"}
PICTURES = (".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    waiting = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    waiting += [target for page in files.documentation_pages() for target in targets(Path(page.abs_src_path or ""))]
    found = set[str]()
    while waiting:
        path = waiting.pop()
        address = address_of(path)
        if path.is_relative_to(ROOT / "docs") or address in found:
            continue
        found.add(address)
        if path.suffix in PICTURES:
            files.append(File.generated(config, address, abs_src_path=str(path)))
        else:
            files.append(File.generated(config, address, content=page_of(path)))
            waiting += targets(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the links of a document that lead outside docs/."""
    path = Path(page.file.abs_src_path or "")
    return with_addresses(markdown, path) if path.is_relative_to(ROOT / "docs") else markdown


def targets(path: Path) -> Iterator[Path]:
    """Return the files and folders of the repository to which a document links."""
    if path.suffix == ".md":
        for link in LINK.finditer(path.read_text(encoding="utf-8")):
            if (target := target_of(link, path)) is not None:
                yield target
    elif path.is_dir():
        yield from (file for file in sorted(path.iterdir()) if file.suffix in (".md", *PICTURES))


def target_of(link: re.Match[str], path: Path) -> Path | None:
    target = Path(os.path.normpath(path.parent / link["target"]))
    return target if target.exists() and target.is_relative_to(ROOT) else None


def address_of(path: Path) -> str:
    """Return the path of a repository file in the site's source tree."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    suffix = "/index.md" if path.is_dir() else "" if path.suffix in (".md", *PICTURES) else ".md"
    return f"repository/{name}{suffix}"


def page_of(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    hidden = "---\nsearch: {exclude: true}\n---\n"
    if path.is_dir():
        links = [f"- [{file.name}]({PurePosixPath(address_of(file)).name})" for file in targets(path)]
        return f"{hidden}# {name}\n\n" + "\n".join(links)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return with_addresses(text, path)
    return f"{hidden}# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def with_addresses(markdown: str, path: Path) -> str:
    """Return a document whose links lead to the site's pages."""
    folder = PurePosixPath(address_of(path)).parent

    def replace(link: re.Match[str]) -> str:
        target = target_of(link, path)
        return link[0] if target is None else link["before"] + os.path.relpath(address_of(target), folder)

    return LINK.sub(replace, markdown)
