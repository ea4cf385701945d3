"""`quire rm`: delete models from the hub's cache."""

import argparse
import difflib
import os
import sys

from quire.config import ModelConfig
from quire_cli.flags import add_flags, engine_options
from quire_cli.models.short_names import BUNDLED, short_name_of, short_names
from quire_cli.models.words import size_text

HELP = "delete models from the hub's cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="short name or Hugging Face id")
    parser.add_argument("-y", "--yes", action="store_true", help="delete without a question")
    add_flags(parser, ModelConfig, ("download_dir",))


def run(arguments: argparse.Namespace) -> int:
    arguments.model = None
    download_dir = engine_options(arguments).get("download_dir")
    from quire_cli.models.cache import cached_models, delete

    cached = {model.name: model for model in cached_models(download_dir)}
    chosen = [cached[name] for name in dict.fromkeys(_cached_name(given, list(cached)) for given in arguments.models)]
    if not arguments.yes and not _agreed(", ".join(f"{model.name} ({size_text(model.size)})" for model in chosen)):
        print("Nothing is deleted.")
        return 1
    freed = 0
    for model in chosen:
        freed += delete(model, download_dir)
        print(f"{model.name} is deleted.")
    print(f"This freed {size_text(freed)}.")
    return 0


def _cached_name(given: str, cached: list[str]) -> str:
    """The name in the cache of a model that the user names. Raises ValueError for what is no cached model."""
    if given in cached:
        return given
    if given == BUNDLED:
        raise ValueError(f"{BUNDLED} is the bundled model, which is a part of Quire")
    if os.path.exists(given):
        raise ValueError(f"{given} is a local file or folder; quire rm deletes only models in the hub's cache")
    if (name := short_names().get(given.lower())) in cached:
        return str(name)
    known = [*cached, *filter(None, map(short_name_of, cached))]
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "quire list shows what is there"
    raise ValueError(f"{given} is not in the hub's cache; {hint}")


def _agreed(what: str) -> bool:
    """Ask on the terminal. Raises ValueError without one."""
    if not sys.stdin.isatty():
        raise ValueError("nobody can be asked, since standard input is no terminal; -y deletes without a question")
    try:
        return input(f"Delete {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
