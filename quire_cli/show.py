"""`quire show`: what a model is, and whether and how fast it runs on this machine."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from quire.config import ModelConfig
from quire.loading.hub import local_model
from quire_cli.flags import add_flags, engine_options
from quire_cli.model import add_model

if TYPE_CHECKING:
    from quire_cli.models.facts import Facts

HELP = "describe a model, and estimate how fast it runs here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, ModelConfig, ("revision", "download_dir", "hf_token"))


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    from quire_cli.models import report
    from quire_cli.models.machine import this_machine
    from quire_cli.models.short_names import BUNDLED, short_name_of

    name = arguments.model or BUNDLED
    path = local_model(arguments.model)
    short_name = short_name_of(name) if path is None else None
    kinds: list[tuple[str, str]] = []
    if path is None:
        facts, place, kinds = _facts_of_hub_model(name, options)
    else:
        from quire_cli.models.facts import facts_of

        facts, place = facts_of(path), f"{path} (bundled)" if arguments.model is None else str(path)
    machine = this_machine()
    if arguments.json:
        print(json.dumps({"name": name, "short_name": short_name, "place": place, **report.as_json(facts, machine)}))
        return 0
    print(report.title(name, short_name), report.table([("place", place), *report.details(facts), *kinds]), "",
          report.on_this_machine(facts, machine), sep="\n")  # fmt: skip
    return 0


def _facts_of_hub_model(name: str, options: dict[str, Any]) -> "tuple[Facts, str, list[tuple[str, str]]]":
    """The facts, where they come from (the cache or, if it has nothing of the model, the hub), and a line about the
    kinds of GGUF models on the hub, if there are several. No weights are downloaded."""
    from quire_cli.models.cache import complete_snapshot
    from quire_cli.models.facts import facts_of
    from quire_cli.models.remote import ask_hub, describe

    if (snapshot := complete_snapshot(name, options.get("revision"), options.get("download_dir"))) is not None:
        return facts_of(snapshot), f"{snapshot} (the hub's cache)", []
    remote = ask_hub(name, options.get("revision"), options.get("hf_token"))
    return describe(remote, options.get("hf_token")), f"on the hub, commit {remote.commit}", remote.kinds
