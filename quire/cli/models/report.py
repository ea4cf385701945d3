"""The text that `quire show` and `quire pull` print about a model on this machine."""

from dataclasses import asdict
from typing import Any

from quire.cli.models.estimate import Estimate, estimates
from quire.cli.models.facts import Facts
from quire.cli.models.machine import Machine
from quire.cli.models.words import count_text, size_text, speed_text
from quire.planner.report import table as table
from quire.planner.sizes import Footprint


def title(name: str, short_name: str | None) -> str:
    return name if short_name is None else f"{name} (short name {short_name})"


def details(facts: Facts) -> list[tuple[str, str]]:
    """Titles and texts of everything that does not depend on the machine."""
    tools, thinking = _recognized(facts)
    rows = [
        ("purpose", facts.purpose),
        ("architecture", facts.architecture or "unknown"),
        ("weights", f"{facts.format}, {size_text(facts.file_bytes)}"),
        *(() if facts.footprint is None else _sizes(facts.footprint)),
        ("chat template", "yes" if facts.chat_template else "no"),
        ("tool calls", tools or "not recognized"),
        ("thinking", thinking or "not recognized"),
    ]
    return rows if facts.licence is None else [*rows, ("licence", facts.licence)]


def _sizes(footprint: Footprint) -> list[tuple[str, str]]:
    spec = footprint.spec
    parameters = footprint.parameters
    number = count_text(parameters.total)
    if parameters.experts:
        number += f", of which a token uses {count_text(parameters.active)}"
    rows = [
        ("parameters", number),
        ("context length", f"{spec.max_positions:,} tokens"),
        ("vocabulary", f"{spec.vocab_size:,} tokens"),
    ]
    if not spec.is_encoder:
        full = size_text(footprint.cache(spec.max_positions))
        rows.append(("KV cache", f"{footprint.cache(1):,} bytes a token, {full} for a request of the full context"))
    return rows


def _recognized(facts: Facts) -> tuple[str | None, str | None]:
    """Return the names of the formats of tool calls and of thinking, as far as the chat template reveals them."""
    from quire.parsing.recognition import recognized

    thinking, tools = recognized(facts.chat_template or "")
    return tools, thinking


def on_this_machine(facts: Facts, machine: Machine) -> str:
    """Whether the model runs here and how fast, as lines."""
    if facts.problem is not None:
        return f"Quire cannot run this model: {facts.problem}"
    if facts.through_transformers:
        return "Quire runs this model through transformers' code. Its speed is not estimated."
    if facts.footprint is None:
        return f"It is used together with a model: it is {facts.purpose}."
    found = estimates(facts.footprint, machine)
    longest = facts.footprint.spec.max_positions
    head = f"On this machine ({machine.device}, {size_text(machine.free)} of memory free"
    if not facts.footprint.generates:
        verb = "fit" if found[0].context else "do not fit"
        return f"{head}), the weights {verb}: they take {size_text(found[0].memory)}."
    rows = [("", "weights", "longest request", "tokens a second")]
    rows += [(e.option, size_text(e.memory), _fit(e, longest), _speed(e)) for e in found]
    lines = [f"{head} and read at {size_text(machine.bandwidth)} a second):", table(rows)]
    lines.append("The speed is an estimate for one request with a short context; several requests together get more.")
    if any(0 < estimate.context < longest for estimate in found):
        lines.append("If memory limits the longest request, --max-model-len auto is needed.")
    return "\n".join(lines)


def _fit(estimate: Estimate, longest: int) -> str:
    if not estimate.context:
        return "does not fit"
    return "full context" if estimate.context >= longest else f"{estimate.context:,} tokens"


def _speed(estimate: Estimate) -> str:
    speed = estimate.tokens_per_second
    return "-" if speed is None or not estimate.context else f"about {speed_text(speed)}"


def as_json(facts: Facts, machine: Machine) -> dict[str, Any]:
    """Return the report as data. Sizes are bytes."""
    (tools, thinking), footprint = _recognized(facts), facts.footprint
    answer: dict[str, Any] = {
        "problem": facts.problem,
        "purpose": facts.purpose,
        "architecture": facts.architecture,
        "format": facts.format,
        "file_bytes": facts.file_bytes,
        "chat_template": facts.chat_template is not None,
        "tool_parser": tools,
        "reasoning_parser": thinking,
        "licence": facts.licence,
        "through_transformers": facts.through_transformers,
        "machine": asdict(machine),
    }
    if footprint is not None:
        answer |= {
            "parameters": footprint.parameters.total,
            "active_parameters": footprint.parameters.active,
            "context_length": footprint.spec.max_positions,
            "vocabulary": footprint.spec.vocab_size,
            "kv_bytes_per_token": footprint.cache(1),
            "kv_bytes_of_full_context": footprint.cache(footprint.spec.max_positions),
            "estimates": [asdict(estimate) for estimate in estimates(footprint, machine)],
        }
    return answer
