"""`quire list`: the models on this machine."""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.created import CreatedModel, CreatedModels
from quire.checkpoints.hub import bundled_model
from quire.cli.flags import add_flags, engine_options
from quire.cli.models.short_names import BUNDLED, listed_names, short_name_of
from quire.config.engine import ModelConfig

if TYPE_CHECKING:
    from quire.cli.models.cache import CachedModel

HELP = "list the models in the hub's cache"


@dataclass(frozen=True)
class Line:
    """size: bytes on disk. last_used: in ISO format, None for the bundled model."""

    name: str
    short_name: str | None
    format: str
    parameters: int | None
    size: int
    last_used: str | None
    partial: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--short-names", action="store_true", help="list the short names of models on the hub instead, in either form"
    )
    add_flags(parser, ModelConfig, ("download_dir",))


def run(arguments: argparse.Namespace) -> int:
    if arguments.short_names:
        _print_short_names(arguments.json)
        return 0
    from quire.cli.models.cache import cached_models

    arguments.model = None
    download_dir = engine_options(arguments).get("download_dir")
    created = CreatedModels(download_dir).all().values()
    lines = [_bundled(), *map(_line, cached_models(download_dir)), *map(_created, created)]
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        print(_as_text(lines))
    return 0


def _print_short_names(as_json: bool) -> None:
    from quire.cli.models.report import table

    print(json.dumps(listed_names(), indent=1) if as_json else table(listed_names().items(), indent=""))


def _bundled() -> Line:
    from quire.cli.models.facts import at_a_glance, local_files

    folder = bundled_model()
    size = sum(local_files(folder).values())
    return Line(BUNDLED, None, *at_a_glance(folder), size=size, last_used=None, partial=False)


def _line(model: "CachedModel") -> Line:
    from quire.cli.models.cache import lacks_weights
    from quire.cli.models.facts import at_a_glance

    snapshot = model.snapshot()
    format, parameters = ("no weights", None) if snapshot is None else at_a_glance(snapshot)
    used = datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds")
    partial = snapshot is None or lacks_weights(snapshot)
    return Line(model.name, short_name_of(model.name), format, parameters, model.size, used, partial)


def _created(model: CreatedModel) -> Line:
    """Return a model created by a client of Ollama's API. Without its own GGUF file, it takes no disk space."""
    file = Path(model.base or "")
    size = file.stat().st_size if file.suffix == ".gguf" and file.is_file() else 0
    made = datetime.fromtimestamp(model.created, UTC).isoformat(timespec="seconds")
    return Line(model.name, None, f"from {model.source}", None, size, made, False)


def _as_text(lines: list[Line]) -> str:
    """Return a table or, on a terminal that is too narrow for it, two lines for each model."""
    from quire.cli.models.report import table, title
    from quire.cli.models.words import age_text, count_text, size_text

    rows = [("NAME", "SHORT NAME", "FORMAT", "PARAMETERS", "SIZE", "LAST USED")]
    for line in lines:
        parameters = "-" if line.parameters is None else count_text(line.parameters)
        size = size_text(line.size) + (" (partial)" if line.partial else "")
        used = "bundled" if line.last_used is None else age_text(datetime.fromisoformat(line.last_used).timestamp())
        rows.append((line.name, line.short_name or "-", line.format, parameters, size, used))
    text = table(rows, indent="")
    if not sys.stdout.isatty() or max(map(len, text.split("\n"))) <= os.get_terminal_size(sys.stdout.fileno()).columns:
        return text
    return "\n".join(
        f"{title(line.name, line.short_name)}\n  {', '.join(cell for cell in row[2:] if cell != '-')}"
        for line, row in zip(lines, rows[1:], strict=True)
    )
