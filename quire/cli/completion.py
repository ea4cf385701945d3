"""`quire completion`: a shell script that completes commands, options, values and models."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELP = "print a script that completes quire's commands in your shell"
_ADVICE = """\
Completion for the current shell:
    bash, zsh:  eval "$(quire completion bash)"     # or zsh, after compinit
    fish:       quire completion fish | source
Write the line to ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish to always have it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{HELP[0].upper()}{HELP[1:]}.\n\n{_ADVICE}"
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["quire"], shell=arguments.shell))
    return 0


def complete(build_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Print the completions of the line in the environment, and end the process."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    command = words[1] if len(words) > 1 else None
    argcomplete.autocomplete(build_parser(command))


def models(prefix: str, **_: Any) -> list[str]:
    """Return the models that can be named: those in the hub's cache, short names, files and folders."""
    from argcomplete.completers import FilesCompleter

    from quire.cli.models.cache import cache_folder
    from quire.cli.models.short_names import BUNDLED, listed_names

    cached = [path.name.removeprefix("models--").replace("--", "/") for path in cache_folder(None).glob("models--*")]
    paths = [path for path in FilesCompleter()(prefix) if Path(path).is_dir() or path.endswith(".gguf")]
    return [name for name in (BUNDLED, *listed_names(), *cached) if name.startswith(prefix)] + paths
