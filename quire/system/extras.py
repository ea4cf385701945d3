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
    from importlib.metadata import PackageNotFoundError, distribution  # takes time to import

    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:  # a copy of the repository that is not installed
        root = Path(__file__).parents[2]
        return (root.as_uri(), True) if (root / "pyproject.toml").is_file() else None
    if text is None:
        return None
    record = json.loads(text)
    return record["url"], record.get("dir_info", {}).get("editable", False)
