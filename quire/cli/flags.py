"""Command-line flags for the options in config.py. options.toml has their help."""

import argparse
import functools
import tomllib
from collections.abc import Collection
from dataclasses import MISSING
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from quire.cli.models.short_names import BUNDLED, created_model, resolve_name
from quire.cli.parser import OPTION_DEST as _DEST
from quire.cli.parser import HelpAll, MergeJson, Parser
from quire.config.engine import GROUPS, OPTIONS, TYPES, ConfigError, ServerConfig, canonical_name, read_option
from quire.messages.errors import error_text

_HELP: dict[str, Any] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
_COMMON: list[str] = _HELP.pop("common")
_HEADINGS = {name: heading for heading, options in _HELP.items() for name in options}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every engine option, grouped as in config.py. Each command adds the model argument itself.

    The parser then also accepts vLLM's other options.
    """
    if isinstance(parser, Parser):
        parser.takes_engine_options = True
        parser.common_options = frozenset(_COMMON)
        parser.add_argument("--help-all", action=HelpAll, help="show all options and exit")
        positional = parser._get_positional_actions()
        parser.epilog = "vLLM's other options are accepted at their neutral values; docs/from-vllm.md lists them."
        parser.usage = " ".join(["%(prog)s", *(f"[{a.metavar or a.dest.upper()}]" for a in positional), "[OPTIONS]"])
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="file with options; the command line takes precedence"
    )
    for config in GROUPS.values():
        add_flags(parser, config)


def add_flags(parser: argparse.ArgumentParser, config: Any, names: Collection[str] = ()) -> None:
    """Add a flag for every option of a class of config.py, or for those with the given names."""
    groups: dict[str, Any] = {}
    for name, option in OPTIONS[config].items():
        if name != "model" and (not names or name in names):
            title = _HEADINGS[name]
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            default = option.default if option.default_factory is MISSING else None
            _add_flag(groups[title], name, default, option.metadata)


def _add_flag(group: Any, name: str, default: Any, metadata: Any) -> None:
    flags = ["--" + name.replace("_", "-"), *metadata.get("flags", ())]
    hint = TYPES[name]
    common = {
        "dest": _DEST + name,
        "default": argparse.SUPPRESS,
        "help": _HELP[_HEADINGS[name]][name].replace("%", "%%"),
    }
    if hint is bool or bool in get_args(hint):
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = name.rsplit("_", 1)[-1].upper()
    if get_origin(hint) is list:
        kind: Any = int if get_args(hint) == (int,) else str
        group.add_argument(*flags, nargs="+", action="extend", type=kind, metavar=metavar, **common)
        return
    choices = [c for c in get_args(hint) if c is not None] if get_origin(hint) is Literal else None
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kind = _reader(name)
    if int in kinds and not metadata.get("size"):
        kind = int
    elif float in kinds:
        kind = float
    if metadata.get("json"):
        common["action"] = MergeJson
    if metadata.get("empty"):
        common |= {"nargs": "?", "const": True}
    if default not in ("", None) and isinstance(default, (int, float, str)):
        common["help"] += f" (default: {default})"
    group.add_argument(*flags, type=kind, choices=choices, metavar=None if choices else metavar, **common)


def _reader(name: str) -> Any:
    """Return the function with which argparse converts the option's text to its value."""

    @functools.wraps(read_option)
    def read(text: str) -> Any:
        try:
            return read_option(name, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error_text(error)) from error

    return read


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options given in a file or as flags, for `LLM(model, **options)`.

    If only the file contains a model, it is written to `arguments.model`. A short name is replaced with the
    repository's name and stored in `arguments.short_name`. The name of a created model is replaced with its source and
    stored in `arguments.created`. Raises ValueError for an unknown name.
    """
    options = _given(arguments)
    from_file = options.pop("model", None)
    model = arguments.model or from_file
    created = None if model is None else created_model(model, options.get("download_dir"))
    if created is not None:
        arguments.model = created.base
        arguments.created = created.name
    elif isinstance(model, str):
        arguments.model = resolve_name(model)
    if created is None and arguments.model not in (None, model):
        arguments.short_name = model
    return {name: value for name, value in options.items() if name not in OPTIONS[ServerConfig]}


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the server options given in a file or as flags, for `ServerConfig.create(**options)`.

    If `engine_options` has resolved a short name or a created model, the server gets it as a second name, unless other
    names are set.
    """
    given = {name: value for name, value in _given(arguments).items() if name in OPTIONS[ServerConfig]}
    if name := getattr(arguments, "created", None):
        model = arguments.model or BUNDLED
        return {"served_model_name": [name] if model.endswith(".gguf") else [model, name], **given}
    if short_name := getattr(arguments, "short_name", None):
        return {"served_model_name": [arguments.model, short_name], **given}
    return given


def option_of(dest: str) -> str:
    """Return the option's name in config.py, or the name of the command's own argument, that is stored in
    argparse's `dest`.
    """
    return dest.removeprefix(_DEST)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = {key.removeprefix(_DEST): value for key, value in vars(arguments).items() if key.startswith(_DEST)}
    file = getattr(arguments, "config", None)  # some commands have only a few of the options, and no such file
    return {**(_read(file) if file else {}), **flags}


def _read(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file. Its keys are the names of flags, with dashes or underscores."""
    import yaml

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error_text(error)}") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"{path} must hold options, such as 'max-model-len: 4096'")
    return {canonical_name(name): value for name, value in options.items()}


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--log-level",
        default=default,
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help=f"log level on standard error (default: {default}); DEBUG shows tracebacks",
    )
