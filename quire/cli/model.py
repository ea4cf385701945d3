"""The model that a command runs: its first argument, or --model."""

import argparse
import os
import shlex
from typing import Any

from quire.cli.completion import models

_HELP = "checkpoint directory, .gguf file, Hugging Face id or short name (default: the bundled model)"


class _Model(argparse.Action):
    """Stores the model given as an argument or as a flag. Two different models are an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if values is None:
            return  # the positional argument was left out
        if namespace.model not in (None, values):
            raise argparse.ArgumentError(
                None, f"two models are given, {namespace.model!r} and {values!r}; leave one out"
            )
        namespace.model = values


def add_model(parser: argparse.ArgumentParser, text: str = _HELP) -> None:
    """Add the model as a positional argument and as --model, for commands whose first argument is the model."""
    positional = parser.add_argument("model", nargs="?", metavar="MODEL", action=_Model, help=text)
    flag = parser.add_argument("--model", metavar="MODEL", action=_Model, help="the same, as a flag")
    complete_models(positional)
    complete_models(flag)


class _Models(_Model):
    """Stores any number of models in `models`, and the only one also as _Model does."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.models = list(dict.fromkeys(values))
        if len(namespace.models) == 1:
            super().__call__(parser, namespace, namespace.models[0], option_string)


def add_models(parser: argparse.ArgumentParser, text: str = _HELP) -> None:
    """Add any number of models as positional arguments, and --model for a single one."""
    parser.set_defaults(models=[])
    positional = parser.add_argument("models", nargs="*", metavar="MODEL", action=_Models, help=text)
    flag = parser.add_argument("--model", metavar="MODEL", action=_Model, help="the same, as a flag")
    complete_models(positional)
    complete_models(flag)


def add_model_flag(parser: argparse.ArgumentParser, text: str = _HELP) -> None:
    """Add only --model, for commands whose first argument is something else."""
    complete_models(parser.add_argument("--model", metavar="MODEL", help=text))


def complete_models(action: argparse.Action) -> None:
    """Let the shell complete the argument with model names, through argcomplete's attribute `completer`."""
    action.completer = models  # type: ignore[attr-defined]


def check_prompt(prompt: str) -> None:
    """Raises ValueError for a prompt that is obviously meant to be the model: a directory, or a file of weights."""
    is_weights = prompt.endswith((".gguf", ".safetensors")) and os.path.isfile(prompt)
    if is_weights or os.path.isdir(prompt):
        model = os.path.dirname(prompt) or "." if prompt.endswith(".safetensors") and is_weights else prompt
        raise ValueError(
            f"{prompt!r} is {'a file' if is_weights else 'a directory'}, not a prompt; to run this model: "
            f'quire generate --model {shlex.quote(model)} "YOUR PROMPT"'
        )
