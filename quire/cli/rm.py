"""`quire rm`: delete models from the hub's cache."""

import argparse
import difflib
import os
import sys

from quire.checkpoints.created import CreatedModels
from quire.checkpoints.hub import split_kind
from quire.cli.flags import add_flags, engine_options
from quire.cli.models.short_names import BUNDLED, short_name_of, short_names
from quire.cli.models.words import size_text
from quire.config.engine import ModelConfig

HELP = "delete models from the hub's cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="short name or Hugging Face id")
    parser.add_argument("-y", "--yes", action="store_true", help="delete without a question")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_flags(parser, ModelConfig, ("download_dir",))


def run(arguments: argparse.Namespace) -> int:
    arguments.model = None
    download_dir = engine_options(arguments).get("download_dir")
    from quire.cli.models.cache import cached_models, delete, delete_files, files_of_kind, has_other_weights

    created = CreatedModels(download_dir)
    cached = {model.name: model for model in cached_models(download_dir)}
    chosen = {}  # name, perhaps with a kind → the model, and those of its files to delete if it is not the whole model
    names = []  # of created models
    for given in arguments.models:
        if given.removesuffix(":latest") in created.all():
            names.append(given.removesuffix(":latest"))
            continue
        name, kind = split_kind(_cached_name(given, list(cached)))
        files = [] if kind is None else files_of_kind(cached[name], kind)
        if kind is not None and not files:
            raise ValueError(f"{given} is not in the hub's cache; quire list shows what is there")
        is_part = kind is not None and has_other_weights(cached[name], kind)
        chosen[f"{name}:{kind}" if is_part else name] = cached[name], files if is_part else []
    sizes = dict.fromkeys(names, 0)
    sizes |= {name: sum(file.stat().st_size for file in files) or model.size for name, (model, files) in chosen.items()}
    if arguments.dry_run:
        for name, size in sizes.items():
            print(f"{name} ({size_text(size)}) would be deleted.")
        return 0
    if not arguments.yes and not _agreed(", ".join(f"{name} ({size_text(size)})" for name, size in sizes.items())):
        print("Nothing is deleted.")
        return 1
    freed = 0
    for name in names:
        created.delete(name)
        print(f"{name} is deleted.")
    for name, (model, files) in chosen.items():
        freed += delete_files(files) if files else delete(model, download_dir)
        print(f"{name} is deleted.")
    print(f"This freed {size_text(freed)}.")
    return 0


def _cached_name(given: str, cached: list[str]) -> str:
    """Return the name in the cache of the model given by the user. Raises ValueError if it is not a cached model."""
    if given.partition(":")[0] in cached:
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
