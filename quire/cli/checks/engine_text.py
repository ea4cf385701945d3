"""What an engine would run, as text: the lines of `quire doctor --model`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from quire.cli.checks.finding import memory_text

_NAME_COLUMNS = 12


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    """data: see EnginePlan.as_data."""
    for name, text in _entries(data):
        yield f"{name:<{_NAME_COLUMNS}}  {text}"


def _entries(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rank = data["rank"]
    limits = data["limits"]
    yield "Quire", data["quire"]
    folder = "" if data["directory"] == data["model"] else f" in {data['directory']}"
    yield "model", f"{data['model']} ({', '.join(data['architectures']) or 'GGUF'}){folder}"
    yield "weights", data["quantization"] or "dense"
    yield "ranks", ", ".join(f"{name} {size}" for name, size in data["ranks"].items() if size not in (1, False)) or "1"
    yield "device", f"{rank['device']}, {rank['dtype']}" + _threads(data)
    yield "kernels", _kernels(rank)
    yield "runner", rank["runner"]
    yield "forward", f"{rank['forward']}: {rank['forward_reason']}"
    flight = "1 step" if limits["depth"] == 1 else f"{limits['depth']} steps"
    tokens = f"{limits['max_num_batched_tokens']:,} tokens in a step, {limits['max_model_len']:,} in a request"
    yield "limits", f"{limits['max_num_seqs']:,} requests, {tokens}, {flight} in flight"
    caching = "prefix caching" if data["prefix_caching"] else "no prefix caching"
    yield "KV cache", f"blocks of {rank['block_size']:,} tokens and {_size(rank['block_bytes'])} on a rank, {caching}"
    for number, group in enumerate(rank["kv_groups"]):
        yield f"KV group {number}", _group(group)
    yield "drafter", _drafter(data["drafter"], rank)
    yield "adapters", f"{data['adapters']} at once" if data["adapters"] else "none"
    for tier in data["tiers"]:
        yield "tier", ", ".join(f"{name} {value}" for name, value in tier.items() if value is not None)
    for adjusted in data["adjusted"]:
        before = "" if adjusted["given"] is None else f" instead of {adjusted['given']}"
        yield "adjusted", f"{adjusted['option']} is {adjusted['used']}{before}: {adjusted['reason']}"


def _threads(data: Mapping[str, Any]) -> str:
    if data["rank"]["device"] != "cpu":
        return ""
    return f", {data['threads']} thread{'' if data['threads'] == 1 else 's'}"


def _kernels(rank: Mapping[str, Any]) -> str:
    """Return the number of operations for each implementation."""
    counts = Counter(rank["kernels"].values())
    text = ", ".join(f"{name} for {count} operations" for name, count in counts.most_common())
    if rank["device"] != "cpu":
        return text
    return f"{text}, instruction set {rank['cpu_isa'] or 'none: the kernels are not compiled yet'}"


def _group(group: Mapping[str, Any]) -> str:
    kept = "" if group["tokens_kept"] is None else f" of {group['tokens_kept']:,} tokens"
    roles = ", ".join(group["roles"])
    elements = group["elements"].removeprefix("torch.")
    return (
        f"{group['kind']}{kept} ({roles}), layers {ranges(group['layers'])}, {group['heads']} heads, "
        f"backend {group['backend']}, {elements}, {_size(group['block_bytes'])} of a block"
    )


def _drafter(drafter: Mapping[str, Any] | None, rank: Mapping[str, Any]) -> str:
    if drafter is None:
        return "none"
    where = "on the host" if rank["drafter_forward"] is None else f"on the device, {rank['drafter_forward']}"
    source = f" by {drafter['model']}" if drafter["model"] else ""
    return f"{drafter['method']}{source}, up to {drafter['num_speculative_tokens']} drafts, {where}"


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]))
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)


def _size(number: int) -> str:
    return memory_text(number) if number >= 2**20 else f"{number / 2**10:.1f} KiB"
