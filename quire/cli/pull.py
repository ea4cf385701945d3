"""`quire pull`: download a model, after describing it and estimating its speed on this machine."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.checkpoints.hub import local_model, resolve
from quire.cli.flags import add_flags, engine_options
from quire.cli.model import complete_models
from quire.cli.models.short_names import short_name_of
from quire.cli.models.words import size_text
from quire.config.engine import ModelConfig
from quire.messages.errors import error_text

HELP = "download a model, and say first how fast it would run here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    complete_models(parser.add_argument("model", metavar="MODEL", help="short name or Hugging Face id"))
    parser.add_argument("--dry-run", action="store_true", help="only say what would be downloaded")
    parser.add_argument("--json", action="store_true", help="print the progress as lines of JSON, and nothing else")
    add_flags(parser, ModelConfig, ("revision", "download_dir", "hf_token"))


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    name: str | None = arguments.model
    if name is None:
        bundled = "The bundled model comes with Quire; there is nothing to download."
        print(json.dumps({"status": "success"}) if arguments.json else bundled)
        return 0
    if local_model(name) is not None:
        raise ValueError(f"{name} is a local file or folder, which comes before a model of that name on the hub")
    revision, folder, token = (options.get(key) for key in ("revision", "download_dir", "hf_token"))
    if not arguments.json:
        return _pull(name, revision, folder, token, arguments.dry_run)
    if arguments.dry_run:
        raise ValueError("dry_run and --json exclude each other")
    return _print_progress(name, revision, folder, token)


def _pull(name: str, revision: str | None, folder: str | None, token: Any, dry_run: bool) -> int:
    """Describe the model, and download the files missing from the cache."""
    from quire.checkpoints.format_names import weight_files
    from quire.cli.models import report
    from quire.cli.models.cache import cache_folder, complete_snapshot, folder_of
    from quire.cli.models.machine import this_machine
    from quire.cli.models.place import check_place
    from quire.cli.models.remote import HubUnreachableError, ask_hub, describe, progress_bars

    try:
        remote = ask_hub(name, revision, token)
    except HubUnreachableError as error:
        if complete_snapshot(name, revision, folder) is None:
            raise
        print(
            f"{name} is in the cache already. Whether there is a newer commit is not known, since {error_text(error)}."
        )
        return 0
    missing = remote.missing(folder_of(remote.name, folder))
    if weight_files(remote.needed) and not missing:
        print(f"{name} is in the cache already, with the hub's commit {remote.commit[:12]}.")
        return 0
    facts = describe(remote, token)
    short_name = short_name_of(name)
    size = sum(missing.values())
    total = sum(remote.needed.values())
    download = f"{len(missing)} of {len(remote.needed)} files, {size_text(size)} of {size_text(total)}"
    print(report.title(name, short_name))
    print(report.table([("commit", remote.commit), ("download", download), *report.details(facts), *remote.kinds]))
    if facts.problem is not None:
        raise ValueError(f"nothing is downloaded, since Quire cannot run this model: {facts.problem}")
    print(f"\n{report.on_this_machine(facts, this_machine())}", flush=True)
    check_place(cache_folder(folder), size)
    if dry_run:
        return 0
    with progress_bars(shown=sys.stderr.isatty()), _ended_by_ctrl_c():
        path = resolve(remote.full_name, revision, folder, token)
    use = "chat" if facts.footprint and facts.footprint.generates and facts.chat_template else "serve"
    print(f"\nIt is in {path}\nTo use it: quire {use} {short_name or remote.full_name}")
    return 0


def _print_progress(name: str, revision: str | None, download_dir: str | None, token: Any) -> int:
    from quire.cli.models.download import download

    for line in download(name, revision, download_dir, token):
        print(json.dumps(line), flush=True)
    return 0


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process immediately. Otherwise, it would wait until the library's threads have finished their
    files.
    """

    def end(*_: object) -> None:
        sys.stderr.write("\n")
        sys.stderr.flush()
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
