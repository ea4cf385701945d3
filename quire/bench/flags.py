"""The flags of the benchmarks, which flags.toml lists, and the requests that they describe."""

import argparse
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quire.bench import slo
from quire.bench.slo import Limit
from quire.messages.errors import error_text

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest, RandomPrompts

DATASETS = ("random", "prefix_repetition", "custom")
BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_VLLM = _TABLES["vllm"]


def add_command(commands: Any, name: str) -> argparse.ArgumentParser:
    """Add a command of `quire bench` with its own flags, and return its parser."""
    command = _TABLES["commands"][name]
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=command["help"], description=command["description"]
    )
    groups: dict[str, Any] = {}
    for title, flags in (item for table in command["flags"] for item in _TABLES[table].items()):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        for flag, entry in flags.items():
            if flag == "description":
                groups[title].description = entry
            else:
                _add_flag(groups[title], flag.split(), **entry)
    return parser


def _add_flag(
    group: Any,
    names: list[str],
    help: str,
    type: str | list[str] = "text",
    default: Any = None,
    several: bool = False,
    repeated: bool = False,
) -> None:
    options: dict[str, Any] = {"default": default, "metavar": names[0].rsplit("-", 1)[-1].upper()}
    if type == "switch":
        options = {"action": "store_true"}
    elif isinstance(type, list):
        options = {"default": default, "choices": type}
    else:
        options |= {"type": TYPES[type], "nargs": "+" if several else None, "action": "append" if repeated else "store"}
    group.add_argument(*names, help=f"{help} (default: {default})" if default else help, **options)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that have no effect or are rejected, without listing them in the help."""
    hidden: Any = {"help": argparse.SUPPRESS, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for flag in _VLLM["switches_without_effect"].split():
        parser.add_argument(flag, action="store_true", **hidden)
    for flag in _VLLM["without_effect"].split():
        parser.add_argument(flag, **hidden)
    for flag, accepted in _VLLM["neutral"].items():
        parser.add_argument(flag, choices=accepted, **hidden)
    for flag in _VLLM["refused"].split():
        parser.add_argument(flag, nargs="*", action=_Refuse, **hidden)


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise argparse.ArgumentError(None, f"{self.option_strings[0]} is not supported by Quire yet")


# ---- types


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _values(text: str) -> tuple[str, list[Any]]:
    """ "max_num_seqs=8,32" -> the name and the values. Values that are not JSON are text; none is None."""
    name, values = _pair(text)
    return name, [_value(part) for part in values.split(",")]


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _params(text: str) -> list[dict[str, Any]]:
    """Parse JSON objects from a file or from the text itself."""
    given = text.lstrip()
    try:
        value = json.loads(given if given.startswith(("[", "{")) else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON, and no file with JSON: {error_text(error)}") from error
    objects = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(objects, list) or not objects or not all(isinstance(params, dict) for params in objects):
        raise argparse.ArgumentTypeError(f"{text!r} must be a list of objects, or an object of objects")
    return [{name.replace("-", "_"): value for name, value in params.items()} for params in objects]


def _slo(text: str) -> list[Limit]:
    try:
        return slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error_text(error)) from error


def _metrics(text: str) -> list[str]:
    if not set(text.split(",")) <= {"ttft", "tpot", "itl", "e2el"}:
        raise argparse.ArgumentTypeError(f"{text!r} has others than ttft, tpot, itl and e2el")
    return text.split(",")


def _percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has numbers that are not from 0 to 100")
    return values


def _goodput(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or float(limit) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not ttft:MS, tpot:MS or e2el:MS")
    return name, float(limit)


def _dataset(text: str) -> str:
    return _one_of(text, DATASETS, _VLLM["refused_datasets"].split())


def _backend(text: str) -> str:
    return _one_of(text, tuple(BACKENDS), _VLLM["refused_backends"].split())


def _one_of(text: str, known: tuple[str, ...], unsupported: list[str]) -> str:
    if text in unsupported:
        raise argparse.ArgumentTypeError(f"{text} is not supported by Quire yet; there are {', '.join(known)}")
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return text


TYPES = {
    "text": str, "int": int, "float": float, "path": Path, "positive": _positive, "pair": _pair, "json": _json_object,
    "metrics": _metrics, "percentiles": _percentiles, "goodput": _goodput, "dataset": _dataset, "backend": _backend,
    "values": _values, "params": _params, "slo": _slo,
}  # fmt: skip


# ---- requests


def make_requests(a: argparse.Namespace, prompts: "RandomPrompts", trace: Path | None = None) -> "list[BenchRequest]":
    """Return the requests that the flags describe, or those of a trace. Raises ValueError for incompatible flags."""
    from quire.bench import datasets

    if trace or a.dataset_name == "custom":
        path = trace or a.dataset_path
        if path is None:
            raise ValueError("--dataset-name custom needs --dataset-path")
        output_len = a.output_len or a.custom_output_len
        return datasets.read_requests(path, prompts, output_len, timed=trace is not None)[: a.num_prompts]
    count = a.num_prompts or 1000
    if a.dataset_name == "prefix_repetition":
        prefix_len = a.prefix_repetition_prefix_len
        suffix_len = a.prefix_repetition_suffix_len
        sizes = (a.prefix_repetition_num_prefixes, prefix_len, suffix_len)
        return datasets.prefix_repetition_requests(
            prompts, count, *sizes, a.output_len or a.prefix_repetition_output_len
        )
    lengths = (a.input_len or a.random_input_len, a.output_len or a.random_output_len)
    return datasets.random_requests(prompts, count, *lengths, a.random_range_ratio, a.random_prefix_len)
