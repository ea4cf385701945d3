"""`quire show`: what a model is, whether it runs on this machine, and how fast."""

import argparse
import json

from quire.checkpoints.hub import local_model
from quire.cli.flags import add_flags, engine_options
from quire.cli.model import add_model
from quire.config.engine import ModelConfig

HELP = "describe a model, and estimate how fast it runs here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_flags(parser, ModelConfig, ("revision", "download_dir", "hf_token"))


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    from quire.cli.models import report
    from quire.cli.models.lookup import look_up
    from quire.cli.models.machine import this_machine
    from quire.cli.models.short_names import BUNDLED, short_name_of

    name = arguments.model or BUNDLED
    short_name = short_name_of(name) if local_model(arguments.model) is None else None
    found = look_up(arguments.model, options)
    facts = found.facts
    place = found.place
    machine = this_machine()
    if arguments.json:
        print(json.dumps({"name": name, "short_name": short_name, "place": place, **report.as_json(facts, machine)}))
        return 0
    print(
        report.title(name, short_name),
        report.table([("place", place), *report.details(facts), *found.kinds]),
        "",
        report.on_this_machine(facts, machine),
        sep="\n",
    )
    return 0
