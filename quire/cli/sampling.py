"""The sampling parameters that a person sets by hand: flags of `generate` and `chat`, and `/set` in a chat."""

import argparse
from typing import Any

from quire.cli.flags import add_engine_flags, add_log_level

PARAMETERS: dict[str, tuple[type[int] | type[float] | type[str], str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "temperature": (float, "0 always takes the likeliest token"),
    "top_p": (float, "draw from the likeliest tokens that together have this probability"),
    "top_k": (int, "draw from this many of the likeliest tokens"),
    "min_p": (float, "draw from tokens at least this probable relative to the likeliest"),
    "repetition_penalty": (float, "above 1, tokens of prompt and output become less likely"),
    "presence_penalty": (float, "above 0, tokens of the output become less likely"),
    "frequency_penalty": (float, "above 0, tokens become less likely each time they are output"),
    "seed": (int, "makes the answer repeatable"),
    "stop": (str, "end before this text"),
}


def add_text_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """What `generate` and `chat` share. max_tokens: the default, None for as many as the context holds."""
    group = parser.add_argument_group("Sampling (options that are not given come from generation_config.json)")
    for name, (kind, text) in PARAMETERS.items():
        options: dict[str, Any] = {"type": kind, "metavar": "N" if kind is int else "X", "help": text}
        if name == "max_tokens":
            options["help"] += f" (default: {max_tokens or 'what the context holds'})"
            options["default"] = max_tokens
        if kind is str:
            options |= {"action": "append", "metavar": "TEXT", "help": f"{text}; may be repeated"}
        # --seed is the engine's, from which requests without a seed of their own draw one.
        flag = "--sampling-seed" if name == "seed" else "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, **options)
    group.add_argument("--ignore-eos", action="store_true", help="go on after end-of-sequence")
    add_log_level(parser, "WARNING")
    add_engine_flags(parser)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_text_flags` read, for `SamplingParams(**options)`."""
    given = {name: getattr(arguments, name) for name in PARAMETERS if getattr(arguments, name) is not None}
    return {"max_tokens": None, "ignore_eos": arguments.ignore_eos, **given}
