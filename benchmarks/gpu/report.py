"""Reports failures, and writes the table of compiled kernels in docs/gpu.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Kernel = dict[str, Any]
BEGIN = "<!-- compiled -->"
END = "<!-- end of compiled -->"
CARDS = {"sm_80": "8.0 A100", "sm_90": "9.0 H100", "sm_100": "10.0 B200", "sm_120": "12.0 RTX PRO 6000"}
CARDS |= {"gfx942": "gfx942 MI300X"}
_SHORT = {"mma.sync": "mma", "wgmma": "wgmma", "tcgen05": "tcgen05", "fma": "fma"}


def failures(result: Result) -> list[str]:
    """Return one line for each rule that a kernel of the case violates."""
    lines = [f"{kernel['name']}: {text}" for kernel in result["kernels"] for text in kernel["broken"]]
    serving = Counter(text.split("[")[0] for text in result["while_serving"])
    lines += [f"{name}: compiled while serving, {count} times" for name, count in serving.items()]
    if result["state"] == "crashed":
        said = [line for line in result["reason"].splitlines() if line.strip(" ^")] or ["without a message"]
        named = [line for line in said if "Error" in line or "Exception" in line] or said
        lines.append(f"crashed: {named[-1].strip()} ... {said[-1].strip()}")
    return lines


def write_report(results: list[Result], path: Path) -> None:
    """Write the table between its markers in the file."""
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{report(results)}\n{END}{after}")


def report(results: list[Result]) -> str:
    if not results:
        return "The check has not run yet."
    cards = [card for card in CARDS if any(r["card"] == card for r in results)]
    newest = max((r["triton"] for r in results), key=lambda version: [int(x) for x in version.split(".")[:2]])
    shown = [r for r in results if r["triton"] == newest]
    parts = [_summary(results)]
    parts += ["### Kernels with products", _products([r for r in shown if len(r["case"].split()) == 2], cards)]
    parts += ["### Other kernels", _others(shown, cards), "### Failures", _failures(results)]
    return "\n\n".join(parts)


def _summary(results: list[Result]) -> str:
    lines = [
        "| Triton | cases | passed | with failures | refused by Quire | different kernels |",
        "|---|---|---|---|---|---|",
    ]
    for version in sorted({r["triton"] for r in results}):
        of = [r for r in results if r["triton"] == version]
        refused = [r for r in of if r["state"] == "refused"]
        bad = [r for r in of if failures(r)]
        kernels = {kernel["hash"] for r in of for kernel in r["kernels"]}
        passed = len(of) - len(refused) - len(bad)
        lines.append(f"| {version} | {len(of)} | {passed} | {len(bad)} | {len(refused)} | {len(kernels)} |")
    return "\n".join(lines)


def _kind(kernel: Kernel) -> str:
    """Return the name of a kernel with products and the rows of its tile, which distinguish its versions."""
    return f"{kernel['name']}, {max(rows for _, rows, _, _, _ in kernel['dots'])} rows"


def _cell(kernels: list[Kernel]) -> str:
    if not kernels:
        return ""
    worst = min(kernels, key=lambda k: (not k["broken"], k["programs"], -k["shared"]))
    kinds = "+".join(sorted({_SHORT[dot[0]] for k in kernels for dot in k["dots"]}))
    numbers = f"{worst['programs']} · {worst['shared'] / 1024:.0f} K · {worst['registers']}"
    text = f"{numbers} · {kinds}" if kinds else numbers
    return f"**{text}**" if any(k["broken"] for k in kernels) else text


def _table(rows: dict[tuple[str, ...], dict[str, list[Kernel]]], head: list[str], cards: list[str]) -> str:
    lines = [
        "| " + " | ".join([*head, *(CARDS[card] for card in cards)]) + " |",
        "|---" * (len(head) + len(cards)) + "|",
    ]
    for name, cells in sorted(rows.items()):
        lines.append("| " + " | ".join([*name, *(_cell(cells[card]) for card in cards)]) + " |")
    return "\n".join(lines)


def _products(results: list[Result], cards: list[str]) -> str:
    rows: dict[tuple[str, ...], dict[str, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for kernel in result["kernels"]:
            if kernel["dots"]:
                rows[_kind(kernel), result["model"]][result["card"]].append(kernel)
    return _table(rows, ["kernel", "model"], cards)


def _others(results: list[Result], cards: list[str]) -> str:
    rows: dict[tuple[str, ...], dict[str, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for kernel in result["kernels"]:
            is_listed = kernel["dots"] and len(result["case"].split()) == 2
            if not is_listed:
                name = _kind(kernel) if kernel["dots"] else kernel["name"]
                rows[(name,)][result["card"]].append(kernel)
    return _table(rows, ["kernel"], cards)


def _failures(results: list[Result]) -> str:
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        for line in dict.fromkeys(failures(result)):
            cases[result["card"], line.replace("|", "/")].append(result["case"].split(" ", 1)[1])
    if not cases:
        return "None."
    lines = ["| card | kernel and rule | cases |", "|---|---|---|"]
    for (card, line), names in sorted(cases.items()):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"| {card} | {line} | {names[0]}{more} |")
    return "\n".join(lines)
