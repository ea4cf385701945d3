"""The sampling parameters of the command line: flags of `generate` and `chat`, and `/set` in a chat."""

import argparse
from typing import Any

from quire.cli.flags import add_engine_flags, add_log_level
from quire.messages.sampling_params import SamplingParams

PARAMETERS: dict[str, tuple[type[int] | type[float] | type[str], str]] = {
    "max_tokens": (int, "maximum number of tokens to generate"),
    "temperature": (float, "randomness of sampling; 0 always takes the most likely token"),
    "top_p": (float, "sample from the most likely tokens whose probabilities add up to this value"),
    "top_k": (int, "sample from this many of the most likely tokens"),
    "min_p": (float, "sample from tokens whose probability is at least this fraction of the highest one"),
    "repetition_penalty": (float, "above 1, tokens of prompt and output become less likely"),
    "presence_penalty": (float, "above 0, tokens of the output become less likely"),
    "frequency_penalty": (float, "above 0, tokens become less likely with each occurrence in the output"),
    "seed": (int, "seed that makes the answer repeatable"),
    "stop": (str, "end the answer before this text"),
}


def add_text_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add the flags shared by `generate` and `chat`. max_tokens: its default; None is the whole context."""
    group = parser.add_argument_group("Sampling (options that are not given come from generation_config.json)")
    for name, (kind, text) in PARAMETERS.items():
        options: dict[str, Any] = {"type": kind, "metavar": "N" if kind is int else "X", "help": text}
        if name == "max_tokens":
            options["help"] += f" (default: {max_tokens or 'what fits in the context'})"
            options["default"] = max_tokens
        if kind is str:
            options |= {"action": "append", "metavar": "TEXT", "help": f"{text}; may be repeated"}
        # --seed is the engine's seed, from which requests without their own seed draw one.
        flag = "--sampling-seed" if name == "seed" else "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, **options)
    group.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-sequence token")
    add_log_level(parser, "WARNING")
    add_engine_flags(parser)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags of `add_text_flags`, for `SamplingParams(**options)`. Raises ValueError."""
    given = {name: getattr(arguments, name) for name in PARAMETERS if getattr(arguments, name) is not None}
    options = {"max_tokens": None, "ignore_eos": arguments.ignore_eos, **given}
    SamplingParams(**options)
    return options
