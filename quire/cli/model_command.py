"""`quire model check`: whether Quire runs a model, what is missing, and which options to use."""

import argparse
import json

from quire.cli.flags import add_flags, engine_options
from quire.cli.model import add_model
from quire.config.engine import ModelConfig

HELP = "check from a model's config and tensor names whether it runs, and with which options"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser("check", help=HELP, description=HELP)
    add_model(action)
    action.add_argument("--json", action="store_true", help="print JSON")
    add_flags(action, ModelConfig, ("revision", "download_dir", "hf_token"))
    action.set_defaults(parser=action)


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 1 if Quire cannot run the model."""
    options = engine_options(arguments)
    from quire.cli.models import check_report
    from quire.cli.models.check import check, files_of
    from quire.cli.models.machine import this_machine
    from quire.cli.models.short_names import BUNDLED

    name = arguments.model or BUNDLED
    with files_of(arguments.model, options) as files:
        result = check(files, this_machine())
    if arguments.json:
        print(json.dumps({"name": name, "place": files.place, **check_report.as_json(result)}))
    else:
        print(check_report.as_text(name, files.place, result))
    return 0 if result.implementation else 1
