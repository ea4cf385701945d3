"""argparse with the conventions of vLLM's command line, and with two-line errors."""

import argparse
import difflib
import json
import sys
from typing import Any, NoReturn

from quire.config.vllm import FOREIGN, LISTS, SHORT_FLAGS

OPTION_DEST = "option_"  # separates the options of config.py and of vLLM from a command's own arguments


class MergeJson(argparse.Action):
    """Stores a JSON object. If the flag is given again, the new object is merged into the earlier one. Any other value,
    which some vLLM options accept, replaces it.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        earlier = getattr(namespace, self.dest, None)
        merged = {**earlier, **values} if isinstance(earlier, dict) and isinstance(values, dict) else values
        setattr(namespace, self.dest, merged)


class HelpAll(argparse.Action):
    """--help-all: print the help with every option, and end the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "nargs": 0, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(lists_all=True), end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Shows a switch as --[no-]flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    """Accepts flags with underscores (--max_model_len), switches with values (--enforce-eager=true), and fields of JSON
    objects (--hf-overrides.rope_theta 1e6).

    takes_engine_options: also accept vLLM options that Quire does not have; `EngineConfig.create` checks them.
    Such a flag is added to the parser when it first occurs, and is not listed in the help. Of the options of config.py,
    --help lists only `common_options`, and --help-all lists all.
    """

    common_options: frozenset[str] = frozenset()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, "formatter_class": _Formatter, **options})
        self.takes_engine_options = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all arguments; unknown ones are errors."""
        given = self._normalized(list(sys.argv[1:] if args is None else args))
        namespace, rest = super().parse_known_args(given, namespace)
        if rest:
            flags = [argument for argument in rest if argument.startswith("-")]
            self.error(self._unknown(flags[0].partition("=")[0]) if flags else f"unexpected argument: {rest[0]}")
        return namespace, rest

    def format_help(self, *, lists_all: bool = False) -> str:
        if lists_all or not self.takes_engine_options:
            return super().format_help()
        hidden = [
            (action, action.help)
            for action in self._actions
            if action.dest.startswith(OPTION_DEST) and action.dest.removeprefix(OPTION_DEST) not in self.common_options
        ]
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help() + f"--help-all lists {len(hidden)} more.\n"
        finally:
            for action, text in hidden:
                action.help = text

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee '{self.prog} --help'.\n")

    def _unknown(self, flag: str) -> str:
        known = [*self._option_string_actions]
        if self.takes_engine_options:
            known += ["--" + name.replace("_", "-") for name in FOREIGN]
        near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=0.7)
        return f"unknown option {flag}" + (f"; did you mean {near[0]}?" if near else "")

    def _normalized(self, given: list[str]) -> list[str]:
        """Return the arguments in the forms that argparse understands."""
        result: list[str] = []
        objects: dict[str, dict[str, Any]] = {}  # by flag
        while given and given[0] != "--":
            argument = given.pop(0)
            name, equals, value = argument.partition("=")
            flag, _, path = name.partition(".")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            action = self._action(flag)
            if action is None:
                result.append(argument)
            elif path and isinstance(action, MergeJson):
                if not equals:
                    value = given.pop(0) if given else ""
                _put(objects.setdefault(flag, {}), path, value)
            elif isinstance(action, argparse.BooleanOptionalAction):
                if not equals and given and given[0].lower() in ("true", "false"):
                    equals = "="
                    value = given.pop(0)
                if value.lower() == "false":
                    result.append(action.option_strings[1])
                else:
                    result.append(flag if value.lower() in ("", "true") else argument)
            else:
                result.append(flag + equals + value)
        for flag, json_object in objects.items():
            result += [flag, json.dumps(json_object)]
        return result + given

    def _action(self, flag: str) -> argparse.Action | None:
        """Return the action of the flag, or None if it is unknown. Adds the flag to the parser if it is a vLLM
        option."""
        if not flag.startswith("-"):
            return None
        if flag not in self._option_string_actions and self.takes_engine_options:
            short = "-O" if flag.startswith("-O") else flag
            name = SHORT_FLAGS.get(short) or flag.removeprefix("--").removeprefix("no-").replace("-", "_")
            if name in FOREIGN:
                self._add(name)
        return self._option_string_actions.get(flag)

    def _add(self, name: str) -> None:
        flags = ["--" + name.replace("_", "-"), *(flag for flag, long in SHORT_FLAGS.items() if long == name)]
        common: Any = {"dest": OPTION_DEST + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        foreign = FOREIGN[name]
        if foreign.switch:
            self.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        else:
            nargs = "+" if name in LISTS else None
            nargs = "*" if foreign.accepted == () else nargs
            action: Any = MergeJson if nargs is None else "store"
            self.add_argument(*flags, type=_value, nargs=nargs, action=action, metavar="VALUE", **common)


def _value(text: str) -> Any:
    """Return the value of a vLLM option: JSON or a Python constant if the text is valid as such, otherwise the text."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], path: str, text: str) -> None:
    """--flag.a.b TEXT sets tree["a"]["b"] = TEXT. --flag.a.b+ TEXT appends TEXT, split at commas, to that list."""
    *keys, last = path.split(".")
    for key in keys:
        tree = tree.setdefault(key, {})
    if last.endswith("+"):
        tree.setdefault(last[:-1], []).extend(_value(item) for item in text.split(","))
    else:
        tree[last] = _value(text)
