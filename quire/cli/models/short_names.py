"""Short names of common models, such as qwen3:0.6b for Qwen/Qwen3-0.6B. short_names.toml lists them."""

import difflib
import os
import tomllib
from functools import cache
from pathlib import Path

from quire.checkpoints.created import CreatedModel, CreatedModels

BUNDLED = "quire-demo"


@cache
def short_names() -> dict[str, str]:
    """Short name → repository on the hub. A family's name alone, or with the tag latest, means its default."""
    names: dict[str, str] = {}
    for family, sizes in _families().items():
        default = sizes[sizes["default"]]
        names |= {family: default, f"{family}:latest": default}
        names |= {f"{family}:{size}": repository for size, repository in sizes.items() if size != "default"}
    return names


@cache
def _families() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return table


def listed_names() -> dict[str, str]:
    """Short name → repository, each with its size, as shown to users."""
    return {
        f"{family}:{size}": repository
        for family, sizes in _families().items()
        for size, repository in sizes.items()
        if size != "default"
    }


def short_name_of(repository: str) -> str | None:
    """Return the short name, with its size, of a repository on the hub."""
    return next((name for name, named in listed_names().items() if named == repository), None)


def created_model(model: str, download_dir: str | None) -> CreatedModel | None:
    """Return the model created under this name by a client of Ollama's API. A local folder comes first."""
    if os.path.isdir(model) or model.startswith((".", "~", "/")) or model.endswith(".gguf"):
        return None
    return CreatedModels(download_dir).all().get(model.removesuffix(":latest"))


def resolve_name(model: str | None) -> str | None:
    """Return the model that a name on the command line refers to: a path, a repository on the hub, or None for the
    bundled model.

    A local folder comes before a short name. Raises ValueError for a name that can be none of these, and suggests
    similar ones.
    """
    if model is None or os.path.isdir(model) or model.endswith(".gguf") or "/" in model or model.startswith((".", "~")):
        return model
    if model == BUNDLED:
        return None
    name = model.lower()
    if name in short_names():
        return short_names()[name]
    raise ValueError(
        f"model {model!r} is no directory here, no Hugging Face id (owner/name) and no short name; {_suggestion(name)}"
    )


def _suggestion(name: str) -> str:
    family, _, _ = name.partition(":")
    if family in _families():
        sizes = [size for size in _families()[family] if size != "default"]
        return f"the short names of {family} are {', '.join(f'{family}:{size}' for size in sizes)}"
    if near := difflib.get_close_matches(name, short_names(), n=3, cutoff=0.6):
        return f"did you mean {' or '.join(near)}?"
    return "quire list --short-names lists these"
