"""Instructions for installing the packages of optional features."""

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "quire-llm"  # "quire" on the package index is another project


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra of pyproject.toml to this environment. It names the folder or file from
    which Quire was installed, since only releases are on the package index.
    """
    origin = _origin()
    if origin is None:
        return f'pip install "{DISTRIBUTION}[{extra}]"'
    url, is_editable = origin
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if path is None or path.is_file():
        return f'pip install "{DISTRIBUTION}[{extra}] @ {url}"'
    folder = "." if path == Path.cwd() else str(path)
    return f'pip install {"-e " if is_editable else ""}"{folder}[{extra}]"'


def _origin() -> tuple[str, bool] | None:
    """Return the URL from which Quire was installed, and whether it runs from there. None for a release from the index.

    Source: PEP 610, Recording the direct URL origin of installed distributions.
    """
    from importlib.metadata import distributions  # slow to import

    records = [found.read_text("direct_url.json") for found in distributions(name=DISTRIBUTION)]
    text = next(filter(None, records), None)
    if text is None:  # a release, or a copy of the repository, where a build may have left an egg-info without a record
        root = Path(__file__).parents[2]
        return (root.as_uri(), True) if (root / "pyproject.toml").is_file() else None
    record = json.loads(text)
    return record["url"], record.get("dir_info", {}).get("editable", False)
