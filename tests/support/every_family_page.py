"""The table of all architectures in docs/models.md, from recorded outcomes, Quire's registry and vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from quire.models.registry import ARCHITECTURES
from support.hearing_families import ARCHITECTURES as HEARING
from support.hearing_families import CLASSIFIERS
from support.pooling_families import FAMILIES, LATE_INTERACTION, WITH_PICTURES

ROOT = Path(__file__).parents[2]
PAGES = ("models.md", "multimodal.md", "speech.md")  # whose text names what other tests compare
BEGIN, END = "<!-- written by tests/models/test_every_family.py --write -->\n", "<!-- end of all -->\n"
POOLING_KINDS = {  # vLLM's tables of models that embed or score, with the words for them
    "embedding": "for embeddings",
    "late interaction": "for late interaction",
    "reward": "for rewards",
    "token classification": "for token classification",
    "sequence classification": "for sequence classification",
}
VLLM_COLUMN = {
    "text": "yes",
    "multimodal": "yes",
    **dict.fromkeys(POOLING_KINDS, "yes"),
    "through transformers": "through transformers' code",
    "plugin": "as a plugin",
    "removed": "removed",
}
ENCODER = "native, with transformers' encoder"
_REFUSED = re.compile(r"^\w+ cannot run with transformers' encoder: |^(?=what \w+Processor makes)")
_PARTS = re.compile(r"runs models of text only, which \w+ is not")
_PREFIX = re.compile(r"model_impl='transformers' (cannot run \w+: )?")


@cache
def vllm() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "tests" / "data" / "vllm_architectures.json").read_text())
    return found


def vllm_status(architecture: str) -> str:
    return next((text for kind, text in VLLM_COLUMN.items() if architecture in vllm()[kind]), "no")


def section(rows: Iterable[dict[str, Any]]) -> str:
    """Counts and the table. rows: the recorded outcomes."""
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: ("native", "encoder", "transformers", "no", "unknown").index(row["runs"])):
        best.setdefault(row["family"].partition(":")[0], row)
    kinds = ("text", "multimodal", *POOLING_KINDS)
    names = {*best, *ARCHITECTURES, *FAMILIES, *LATE_INTERACTION, *(name for kind in kinds for name in vllm()[kind])}
    runs = {name: how(name, best.get(name)) for name in names}
    lines = [*counts(runs), "", "| architecture | runs | compared with | vLLM |", "|---|---|---|---|"]
    for name in sorted(names, key=lambda name: (name.lower(), name)):
        lines.append(f"| `{name}` | {runs[name]} | {compared(name, best.get(name))} | {vllm_status(name)} |")
    return "\n".join(lines) + "\n"


def counts(runs: dict[str, str]) -> list[str]:
    made = []
    for kind, words in (("text", "for text"), ("multimodal", "for images or audio"), *POOLING_KINDS.items()):
        names = vllm()[kind]
        proven = [name for name in names if kind not in POOLING_KINDS or pools(name)]
        native = sum(runs[name] == "native" for name in proven)
        encoder = sum(runs[name] == ENCODER for name in proven)
        other = sum(runs[name] == "transformers' code" for name in proven)
        mixed = f"{encoder} natively with transformers' encoder, " if encoder else ""
        made.append(
            f"Of the {len(names)} architectures {words} in the registry of vLLM {vllm()['version']}, Quire runs "
            f"{native + encoder + other}: {native} natively, {mixed}{other} through transformers' code."
        )
    return made


def pools(name: str) -> bool:
    """Whether a test compares the vectors or scores of an architecture, or it generates, so that any embeds."""
    with_items = name in WITH_PICTURES or name in LATE_INTERACTION or name in CLASSIFIERS
    return name in FAMILIES or with_items or (name in ARCHITECTURES and name.endswith("ForCausalLM"))


def how(name: str, row: dict[str, Any] | None) -> str:
    listed = name in ARCHITECTURES or name in FAMILIES or name in LATE_INTERACTION or name in CLASSIFIERS
    if listed and (row is None or row["runs"] != "encoder"):
        return "native"
    if name in HEARING:
        return ENCODER
    if row is None:
        return "not yet"
    if row["runs"] == "transformers":
        return "transformers' code"
    if row["runs"] == "encoder":
        items = "sounds" if row.get("hears") else "pictures"
        return ENCODER if row.get("seen") else f"{ENCODER}; {items} were not compared ({row['unseen']})"
    with_items = row["sees"] or row.get("hears")
    if with_items and _REFUSED.search(row.get("reason", "")):
        return f"not yet; {_REFUSED.sub('', row['reason'])}"
    if with_items and (row["sees"] or row["runs"] == "no"):
        return "not yet; its encoder is missing"
    if row["runs"] == "unknown":
        return f"not yet; the rules make no checkpoint ({row['reason']})"
    reason = _PREFIX.sub("", row["reason"])
    return f"not yet; {_PARTS.sub('it has more parts than a text model', reason)}"


def compared(name: str, row: dict[str, Any] | None) -> str:
    """row: None without an outcome. The other tests of native architectures are named on their pages."""
    parts = []
    if name in HEARING:
        parts.append("transformers, with sounds")
    elif row is not None and row.get("tokens"):
        items = "sounds" if row.get("hears") else "pictures"
        of = (f", with {items}" if row.get("seen") else ", on texts") if row["sees"] or row.get("hears") else ""
        parts.append(f"transformers{of}")
    if name in ARCHITECTURES:
        page = next((page for page in PAGES if f"`{name}`" in _written_by_hand(page)), None)
        if page is not None:
            parts.append("[see above](#architectures)" if page == "models.md" else f"[see {page}]({page})")
    if name in FAMILIES:
        parts.append(f"{FAMILIES[name].compared}, on [vectors or scores](embeddings.md)")
    if name in WITH_PICTURES:
        parts.append("transformers, on [vectors](embeddings.md) of pictures and texts")
    if name in CLASSIFIERS:
        parts.append("transformers, on [scores](embeddings.md) of sounds and texts")
    if name in LATE_INTERACTION:
        parts.append("transformers, and the head's formula, on [vectors](embeddings.md) of pictures and texts")
    return "; ".join(parts)


@cache
def _written_by_hand(page: str) -> str:
    """A page's text without the table of this module."""
    return (ROOT / "docs" / page).read_text().partition(BEGIN)[0]
