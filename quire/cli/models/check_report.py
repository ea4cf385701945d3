"""The text and the JSON of `quire model check`."""

import shlex
from dataclasses import asdict
from typing import Any

from quire.cli.models.check import Check, Near, some
from quire.cli.models.words import count_text, size_text
from quire.models.fit import TensorFit
from quire.planner.report import table


def as_text(name: str, place: str, check: Check) -> str:
    facts = check.facts
    rows = [
        ("runs", _implementation(check)),
        *(("missing", problem) for problem in check.problems),
        ("place", place),
        ("purpose", facts.purpose),
        ("architecture", facts.architecture or "unknown"),
        ("weights", f"{facts.format}, {size_text(facts.file_bytes)}"),
    ]
    if facts.footprint is not None:
        rows.append(("parameters", count_text(facts.footprint.parameters.total)))
        rows.append(("tensors", _tensors(check.tensors)))
    if check.unread:
        rows.append(("not read", f"fields of config.json that the family does not use: {some(check.unread, 12)}"))
    parts = [name, table(rows)]
    if facts.footprint is not None:
        parts += ["", "Memory:", table(_memory(check))]
    if check.nearest:
        parts += ["", "The nearest families that Quire has:", table(map(_near, check.nearest))]
    if check.implementation and facts.architecture:
        chosen = " ".join(option.text for option in check.options)
        parts += ["", f"To use it here: quire serve {shlex.quote(name)} {chosen}".rstrip()]
    elif check.options:
        parts += ["", "Options that may run it:"]
    if check.options:
        parts.append(table((option.text, option.reason) for option in check.options))
    return "\n".join(parts)


def _implementation(check: Check) -> str:
    if check.implementation is None:
        return "no"
    if check.implementation == "transformers":
        return "slowly, through transformers' code (--model-impl auto), if its layers pass the test at the start"
    return "natively" if check.facts.architecture else f"with a model: it is {check.facts.purpose}"


def _tensors(fit: TensorFit | None) -> str:
    if fit is None:
        return "names unknown: there is neither an index nor a safetensors file"
    if fit.is_complete:
        return f"{fit.count:,}, which are those that the family expects"
    return f"{fit.count:,}, of which the family expects {fit.count - len(fit.unexpected):,}"


def _memory(check: Check) -> list[tuple[str, str]]:
    weights = {("as it is" if kind == "none" else f"--quantization {kind}"): n for kind, n in check.weights.items()}
    rows = [(f"weights {kind}", size_text(size)) for kind, size in weights.items()]
    for kind, size in check.cache.items():
        option = "" if kind == "auto" else f" with --kv-cache-dtype {kind}"
        rows.append((f"KV cache{option}, 1,000 tokens", size_text(size)))
    return rows


def _near(near: Near) -> tuple[str, str]:
    if near.problem is not None:
        return near.architecture, f"does not read this config: {near.problem}"
    parts = [f"does not read {some(near.unread, 8)}" if near.unread else "reads all fields"]
    if near.tensors is not None:
        parts.append(f"{near.tensors.share:.0%} of the tensor names are the same")
        odd = near.tensors.unexpected
        parts += [f"unknown to it: {some(odd)}"] if odd else []
    return near.architecture, "; ".join(parts)


def as_json(check: Check) -> dict[str, Any]:
    """Return the result as data. Sizes are bytes."""
    facts = check.facts
    return {
        "runs": check.implementation,
        "problems": check.problems,
        "purpose": facts.purpose,
        "architecture": facts.architecture,
        "format": facts.format,
        "file_bytes": facts.file_bytes,
        "parameters": None if facts.footprint is None else facts.footprint.parameters.total,
        "unread_fields": check.unread,
        "tensors": None if check.tensors is None else asdict(check.tensors),
        "weight_bytes": check.weights,
        "kv_bytes_per_1000_tokens": check.cache,
        "options": [asdict(option) for option in check.options],
        "nearest": [asdict(near) for near in check.nearest],
    }
