"""Whether Quire runs a model, what is missing, and which options it needs: from its config and tensor names only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.checkpoints.hub import INDEXES, local_model, read_json
from quire.cli.models.cache import complete_snapshot
from quire.cli.models.estimate import Estimate, estimates
from quire.cli.models.facts import NO_WEIGHTS, Facts, facts_of, local_files, quantization_problem
from quire.cli.models.machine import Machine
from quire.cli.models.remote import ask_hub, small_files
from quire.cli.models.short_names import BUNDLED
from quire.config.engine import ModelConfig
from quire.models.fit import TensorFit
from quire.planner.sizes import HALF, Footprint

Implementation = Literal["native", "transformers"]
_TOKENS = 1000
_NEAR = 5  # families whose tensor names are compared with those of an unknown model
_SHOWN = 3


class Files(NamedTuple):
    """path: a folder with at least the small files of a model, or its GGUF file. sizes: of all files, None if the
    folder has all of them. place: where the model is."""

    path: Path
    sizes: Mapping[str, int] | None
    place: str


@dataclass(frozen=True)
class Option:
    text: str
    reason: str


@dataclass(frozen=True)
class Near:
    """A native family that resembles an unknown model. unread: fields of the config that the family does not read.
    problem: why its layers cannot be built from this config. tensors: None if the names of tensors are not known."""

    architecture: str
    unread: list[str]
    problem: str | None = None
    tensors: TensorFit | None = None

    @property
    def fits(self) -> bool:
        return self.tensors is not None and self.tensors.is_complete and not self.unread


@dataclass(frozen=True)
class Check:
    """implementation: None if Quire cannot run the model. problems: what is missing. unread: fields of the config that
    the family does not read. weights: bytes of memory by the value of --quantization. cache: bytes of the KV cache for
    1,000 tokens of a request by the value of --kv-cache-dtype."""

    facts: Facts
    implementation: Implementation | None
    problems: list[str]
    unread: list[str]
    tensors: TensorFit | None
    weights: dict[str, int]
    cache: dict[str, int]
    options: list[Option]
    nearest: list[Near]


@contextmanager
def files_of(model: str | None, options: Mapping[str, Any]) -> Iterator[Files]:
    """Provide the small files of a model, from a folder, the hub's cache or the hub. options: may have revision,
    download_dir and hf_token. Raises ModelNotFoundError."""
    token = options.get("hf_token")
    name = model or BUNDLED
    if (path := local_model(model)) is not None:
        yield Files(path, _with_indexed(path), str(path))
    elif (snapshot := complete_snapshot(name, options.get("revision"), options.get("download_dir"))) is not None:
        yield Files(snapshot, None, f"{snapshot} (the hub's cache)")
    else:
        remote = ask_hub(name, options.get("revision"), token)
        with small_files(remote, token, with_tensors=True) as path:
            yield Files(path, remote.files, f"on the hub, commit {remote.commit}")


def _with_indexed(path: Path) -> dict[str, int] | None:
    """Return the sizes of a folder's files, and of the weights that its index lists; None if no weights are absent.
    The first absent file has the size of all."""
    if path.is_file():
        return None
    found = local_files(path)
    for name in INDEXES:
        index = read_json(path, name)
        files = index.get("weight_map")
        absent = sorted(set(files.values()) - found.keys()) if isinstance(files, dict) else []
        if absent:
            total = (index.get("metadata") or {}).get("total_size")
            sizes = [int(total) if isinstance(total, int | float) else 0] + [0] * (len(absent) - 1)
            return {**found, **dict(zip(absent, sizes, strict=True))}
    return None


def check(files: Files, machine: Machine) -> Check:
    """Raises ModelNotFoundError for a folder without a config, and WeightError for damaged files."""
    from quire.checkpoints.metadata import hf_config

    facts = facts_of(files.path, files.sizes)
    is_model = files.path.is_file() or (files.path / "config.json").is_file()
    config = hf_config(files.path, {}) if is_model else {}
    lacks_weights = facts.problem == NO_WEIGHTS and files.sizes is None  # they need not be in a local folder
    problems = [] if facts.problem is None or lacks_weights else [facts.problem]
    footprint = facts.footprint
    tensors = None
    unread: list[str] = []
    nearest: list[Near] = []
    if footprint is not None and not problems:
        tensors = _fit(files.path, {})
        unread = [] if files.path.is_file() else _unread(config)
        problems += _tensor_problems(tensors)
    elif footprint is None and config and problems and not facts.through_transformers:
        if (problem := quantization_problem(config)) is not None and problem not in problems:
            problems.append(problem)
        nearest = _nearest(files.path, config)
    implementation: Implementation | None = None
    if not problems:
        implementation = "transformers" if facts.through_transformers else "native"
    return Check(
        facts,
        implementation,
        problems,
        unread,
        tensors,
        {"none": facts.file_bytes} if footprint is None else _weights(footprint),
        {} if footprint is None else _cache(footprint),
        [*_memory_options(footprint, machine), *_other_options(facts)] if implementation else _overrides(nearest),
        nearest,
    )


def _fit(path: Path, overrides: dict[str, Any]) -> TensorFit | None:
    """Return how the tensors fit the family, None if their names are not known. overrides: of fields of the config.
    Raises ValueError."""
    from quire.checkpoints.gguf import read_gguf
    from quire.checkpoints.gguf_checkpoint import GgufCheckpoint
    from quire.checkpoints.gguf_models import gguf_tensors
    from quire.checkpoints.index import known_tensors
    from quire.checkpoints.weights import Checkpoint
    from quire.models.description import describe
    from quire.models.fit import fit_of

    is_gguf = path.is_file()
    checkpoint: Checkpoint | None = GgufCheckpoint(gguf_tensors(read_gguf(path))) if is_gguf else known_tensors(path)
    return None if checkpoint is None else fit_of(describe(path, ModelConfig(hf_overrides=overrides)), checkpoint)


def _unread(config: dict[str, Any]) -> list[str]:
    from quire.models.nearest import unread_fields
    from quire.models.registry import ARCHITECTURES

    name = next((name for name in config.get("architectures") or () if name in ARCHITECTURES), None)
    return [] if name is None else unread_fields(config, name)


def _tensor_problems(tensors: TensorFit | None) -> list[str]:
    if tensors is None:
        return []
    lists = {
        "tensors are missing": tensors.missing,
        "tensors are unknown to the family": tensors.unexpected,
        "tensors have other shapes than config.json asks for": tensors.misshapen,
    }
    return [f"{len(names)} {text}: {some(names)}" for text, names in lists.items() if names]


def some(names: list[str] | tuple[str, ...], most: int = _SHOWN) -> str:
    """Return the first names, and how many there are besides."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _nearest(path: Path, config: dict[str, Any]) -> list[Near]:
    """Return the families with the most similar config, or, if the names of tensors are known, with the most common
    names among these."""
    from quire.models.nearest import nearest, unread_fields

    found = []
    for architecture in nearest(config, _NEAR):
        near = Near(architecture, unread_fields(config, architecture))
        try:
            found.append(replace(near, tensors=_fit(path, {"architectures": [architecture]})))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            from quire.messages.errors import error_text

            found.append(replace(near, problem=error_text(error)))
    found.sort(key=lambda near: -1.0 if near.tensors is None else near.tensors.share, reverse=True)
    return found[:_SHOWN]


def _weights(footprint: Footprint) -> dict[str, int]:
    return {str(kind or "none"): round(footprint.weights(kind)[0]) for kind in footprint.quantizations}


def _cache(footprint: Footprint) -> dict[str, int]:
    if footprint.spec.is_encoder:
        return {}
    sizes = {"auto": footprint.element_bytes}
    if footprint.generates and footprint.element_bytes == HALF and not footprint.spec.has_states:
        sizes["fp8"] = 1
    return {kind: replace(footprint, element_bytes=size).cache(_TOKENS) for kind, size in sizes.items()}


def _memory_options(footprint: Footprint | None, machine: Machine) -> list[Option]:
    """Return what the model needs to fit into this machine's memory: the least quantization that leaves the full
    context, or else the longest one."""
    if footprint is None:
        return []
    found = estimates(footprint, machine)
    longest = footprint.spec.max_positions
    full = next((estimate for estimate in found if estimate.context >= longest), None)
    best: Estimate = full or max(found, key=lambda estimate: estimate.context)
    options = []
    if best.quantization is not None:
        options.append(Option(best.option, "the weights as they are leave too little memory here"))
    if not best.context and footprint.generates:
        return [Option("--tensor-parallel-size N", "the weights do not fit into this machine's memory; see quire plan")]
    if full is None and footprint.generates:
        options.append(Option("--max-model-len auto", f"memory limits a request to {best.context:,} tokens"))
    return options


def _other_options(facts: Facts) -> list[Option]:
    from quire.parsing.recognition import recognized

    template = facts.chat_template or ""
    if "tools" not in template or recognized(template)[1] is not None:
        return []
    return [Option("--tool-call-parser NAME", "the format of tool calls is not recognized from the chat template")]


def _overrides(nearest: list[Near]) -> list[Option]:
    """Return the option that runs an unknown architecture as a family that reads all of its fields and tensors."""
    near = next((near for near in nearest if near.fits), None)
    if near is None:
        return []
    text = f'--hf-overrides \'{{"architectures": ["{near.architecture}"]}}\''
    return [Option(text, "all fields and tensors are this family's; compare the outputs with the original code")]
