"""`quire`: the command line. Each command is a file of this package."""

import argparse
import atexit
import os
import sys
import threading
from importlib import import_module
from typing import NoReturn

from quire._version import __version__
from quire.messages.errors import error_text
from quire.observability.logging import configure_logging, log_options, logger
from quire.platform import lean_torch
from quire.platform.garbage import collect_rarely, skip_last_collection
from quire.platform.termination import end_on_signals, end_process

collect_rarely()
lean_torch.prepare()
atexit.register(skip_last_collection)

COMMANDS = {  # the modules of this package by the names of commands
    ("serve",): "serve",
    ("route",): "route",
    ("generate",): "generate",
    ("chat",): "chat",
    ("run-batch",): "run_batch",
    ("pull",): "pull",
    ("list", "ls"): "list_models",
    ("show",): "show",
    ("rm",): "rm",
    ("model",): "model_command",
    ("bench",): "bench",
    ("plan",): "plan",
    ("compile",): "compile",
    ("doctor",): "doctor",
    ("top",): "top",
    ("completion",): "completion",
}
_WITH_TORCH = {"generate", "chat"}  # commands whose engine runs in this process
_HELP = {"-h", "--help", "--help-all"}


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """wanted: a command's name. If it exists, only its parser is created, and the other commands' modules are not
    imported.
    """
    from quire.cli.parser import Parser

    parser = Parser(
        prog="quire", description="Quire, an LLM inference engine. Without a model, commands use the bundled one."
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    chosen = [names for names in COMMANDS if wanted in names] or list(COMMANDS)
    for name, *aliases in chosen:
        module = import_module(f"quire.cli.{COMMANDS[name, *aliases]}")
        command = commands.add_parser(name, aliases=aliases, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 for an error that the user can fix (one line on standard error); 130 for Ctrl-C; 143 for
    SIGTERM and 129 for SIGHUP, which a running server handles itself.
    """
    if threading.current_thread() is threading.main_thread():
        end_on_signals()
    argv = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # set by the script of `quire completion`
        from quire.cli.completion import complete

        complete(build_parser)
    if argv and argv[0] in _WITH_TORCH and _HELP.isdisjoint(argv):
        from quire.platform.torch_import import load_library

        load_library()
    parser = build_parser(argv[0] if argv else None)
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 0
    configure_logging(getattr(arguments, "log_level", "INFO"))
    try:
        return int(arguments.run(arguments) or 0)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no reader: the flush at exit must not fail
            return 0
        if getattr(arguments, "log_level", "INFO").upper() == "DEBUG":
            raise
        from quire.cli.errors import with_flags

        message = with_flags(error_text(error), arguments.parser, argv)
        if log_options().format == "json":
            logger.error("%s", message)
        else:
            print(f"quire: error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def command() -> NoReturn:
    """The entry point of `quire` and `python -m quire`."""
    end_process(main())
