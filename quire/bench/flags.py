"""Flags as tables, and the flags that `quire bench serve` and the offline benchmarks share: those of the requests."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.vllm_flags import dataset

if TYPE_CHECKING:
    from quire.bench.datasets import BenchRequest, RandomPrompts

# (flag and other names of it, type, default, help). The type is a function that converts the text, bool for a switch, a
# tuple of choices, or a list of one function for a flag that takes several values.
Flag = tuple[str, Any, Any, str]


def add_flags(group: Any, flags: Iterable[Flag]) -> None:
    for names, kind, default, text in flags:
        flag, *others = names.split()
        options: dict[str, Any] = {"default": default, "metavar": flag.rsplit("-", 1)[-1].upper()}
        if kind is bool:
            options = {"action": "store_true"}
        elif isinstance(kind, tuple):
            options = {"default": default, "choices": kind}
        elif isinstance(kind, list):
            options |= {"nargs": "+", "type": kind[0]}
        else:
            options["type"] = kind
        shown = f"(default: {default})" if default and kind is not bool else ""
        group.add_argument(flag, *others, help=f"{text} {shown}".strip(), **options)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


REQUEST_FLAGS: list[Flag] = [
    ("--dataset-name", dataset, "random", "random, prefix_repetition or custom"),
    ("--dataset-path", Path, None, 'for custom, one request per line: {"prompt" or "prompt_token_ids": ..., '
     '"output_tokens": ...}'),
    ("--input-len", positive, None, "the same as --random-input-len"),
    ("--output-len", positive, None, "tokens per answer, for every dataset"),
    ("--num-prompts", positive, None, "number of requests (default: 1000, or the whole file)"),
    ("--random-input-len", int, 1024, "tokens per random prompt"),
    ("--random-output-len", int, 128, "tokens per answer to a random prompt"),
    ("--random-prefix-len --prefix-len", int, 0, "length of a prefix that all random prompts share"),
    ("--random-range-ratio", float, 0.0, "lengths are uniform within plus or minus this fraction"),
    ("--prefix-repetition-prefix-len", positive, 256, "tokens per prefix"),
    ("--prefix-repetition-suffix-len", positive, 256, "tokens after the prefix"),
    ("--prefix-repetition-num-prefixes", positive, 10, "number of prefixes"),
    ("--prefix-repetition-output-len", positive, 128, "tokens per answer"),
    ("--custom-output-len", positive, 256, "tokens per answer if the file does not give a number"),
]  # fmt: skip


def make_requests(a: argparse.Namespace, prompts: "RandomPrompts", trace: Path | None = None) -> "list[BenchRequest]":
    """The requests that the flags describe, or those of a trace. Raises ValueError for flags that do not fit."""
    from quire.bench import datasets

    if trace or a.dataset_name == "custom":
        path = trace or a.dataset_path
        if path is None:
            raise ValueError("--dataset-name custom needs --dataset-path")
        output_len = a.output_len or a.custom_output_len
        return datasets.read_requests(path, prompts, output_len, timed=trace is not None)[: a.num_prompts]
    count = a.num_prompts or 1000
    if a.dataset_name == "prefix_repetition":
        prefix_len, suffix_len = a.prefix_repetition_prefix_len, a.prefix_repetition_suffix_len
        sizes = (a.prefix_repetition_num_prefixes, prefix_len, suffix_len)
        return datasets.prefix_repetition_requests(
            prompts, count, *sizes, a.output_len or a.prefix_repetition_output_len
        )
    lengths = (a.input_len or a.random_input_len, a.output_len or a.random_output_len)
    return datasets.random_requests(prompts, count, *lengths, a.random_range_ratio, a.random_prefix_len)
