"""How to install what an optional feature needs."""

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "quire-llm"  # "quire" on the package index is another project


def install_command(extra: str) -> str:
    """The pip command that adds an extra of pyproject.toml to this environment.

    It names the folder or the file that Quire was installed from, since only a release is on the package index.
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
    """The URL that Quire was installed from, and whether it runs from there. None for a release of the index.

    Source: PEP 610, Recording the direct URL origin of installed distributions.
    """
    from importlib.metadata import distributions  # takes time to import

    records = [found.read_text("direct_url.json") for found in distributions(name=DISTRIBUTION)]
    text = next(filter(None, records), None)
    if text is None:  # a release, or a copy of the repository, where a build may have left an egg-info without a record
        root = Path(__file__).parents[2]
        return (root.as_uri(), True) if (root / "pyproject.toml").is_file() else None
    record = json.loads(text)
    return record["url"], record.get("dir_info", {}).get("editable", False)
