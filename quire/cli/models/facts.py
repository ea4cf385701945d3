"""Facts about a model from its small files, without its weights: what it is, and what it needs."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.format_names import (
    format_of,
    gguf_bytes,
    gguf_format,
    quantization_of,
    quantized_bytes,
    weight_files,
)
from quire.checkpoints.hub import files_of_model, read_json
from quire.config.engine import ModelConfig
from quire.messages.errors import error_text
from quire.models.spec import DecoderSpec
from quire.planner.sizes import FULL, HALF, Footprint, parameters_of

# The exceptions of functions that read an architecture's config, if a config is not as expected.
_WRONG_CONFIG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
NO_WEIGHTS = "it has no weights in a format that Quire reads"
_INPUTS = {"image": "pictures", "video": "videos", "audio": "sounds"}
_HEADS = ("eagle", "eagle3", "medusa", "mlp_speculator")  # drafters that are no whole models


@dataclass(frozen=True)
class Facts:
    """problem: why Quire cannot run the model, or None. purpose: its task. format, file_bytes: of its
    weights. footprint: None for an adapter, a drafter, an unknown model, and one that runs through transformers' code.
    """

    problem: str | None
    purpose: str
    architecture: str
    format: str
    file_bytes: int
    chat_template: str | None = field(default=None, repr=False)
    licence: str | None = None
    footprint: Footprint | None = None
    through_transformers: bool = False


def facts_of(path: Path, files: Mapping[str, int] | None = None) -> Facts:
    """Return the facts of a model in a folder, or in a .gguf file.

    files: the sizes of all files of the model, for a folder with only the small ones. Raises ModelNotFoundError for
    a folder without a config, and WeightError for a file that is not a GGUF file.
    """
    if path.is_file():
        return _of_gguf(path)
    name = "the model"  # its folder is a temporary one
    if files is None:
        name = str(path)
        files = local_files(path)
    weights = weight_files(files_of_model(files))
    size = sum(files[name] for name in weights)
    licence = _licence_of_card(path / "README.md")
    if not (path / "config.json").is_file():
        adapter = read_json(path, "adapter_config.json")
        if not adapter:
            raise ModelNotFoundError(f"{name} has no config.json; is it a checkpoint in the Hugging Face layout?")
        purpose = f"an adapter (LoRA) for {adapter.get('base_model_name_or_path') or 'another model'}"
        return Facts(None, purpose, "", format_of({}, weights), size, licence=licence)
    config = read_json(path, "config.json")
    names = config.get("architectures")
    architecture = ", ".join(map(str, names)) if isinstance(names, list) else ""
    known = (architecture, format_of(config, weights), size, _chat_template(path), licence)
    if (method := _drafter_method(config)) is not None:
        return Facts(None, f"a drafter ({method}) for speculation", *known)
    try:
        if (described := _spec_through_transformers(config)) is not None:
            problem = None if weights else NO_WEIGHTS
            return Facts(problem, _purpose(config, described, path)[1], *known, through_transformers=True)
        spec = _spec_of(config)
        generates, purpose = _purpose(config, spec, path)
        footprint = _footprint(config, spec, generates, size)
        problem = None if weights else NO_WEIGHTS
        return Facts(quantization_problem(config) or problem, purpose, *known, footprint)
    except _WRONG_CONFIG as error:
        return Facts(_reason(error), "unknown", *known)


def _footprint(config: dict[str, Any], spec: DecoderSpec, generates: bool, file_bytes: int) -> Footprint:
    parameters = parameters_of(spec)
    quantization = quantization_of(config)
    if quantization is None:
        is_full = not generates and str(config.get("dtype") or config.get("torch_dtype")) == "float32"
        size = FULL if is_full else HALF
        return Footprint(spec, parameters, size, size, size, True, size, generates)
    tables = parameters.embedding + parameters.head
    in_files = (file_bytes - HALF * tables) / max(1, parameters.total - tables)
    linear = quantized_bytes(config)
    if in_files > 1.02 * max(linear, quantized_bytes(config, scale_bytes=4)):  # some layers are not quantized
        linear = in_files
    return Footprint(spec, parameters, linear, HALF, HALF, generates=generates)


def _of_gguf(path: Path) -> Facts:
    from quire.checkpoints.gguf import read_gguf
    from quire.checkpoints.gguf_models import gguf_config
    from quire.text.gguf_tokenizer import gguf_chat_templates

    gguf = read_gguf(path)
    size = sum(file.stat().st_size for file in {tensor.file for tensor in gguf.tensors.values()})
    templates = gguf_chat_templates(gguf.metadata)
    licence = gguf.metadata.get("general.license")
    known = (gguf_format(gguf), size, _of_tools(templates), licence if isinstance(licence, str) else None)
    try:
        config = gguf_config(gguf)
        spec = _spec_of(config)
    except _WRONG_CONFIG as error:
        return Facts(_reason(error), "unknown", str(gguf.metadata.get("general.architecture", "")), *known)
    parameters = parameters_of(spec)
    sizes = {name: gguf_bytes(t.kind.name) * math.prod(t.shape) for name, t in gguf.tensors.items()}
    table = sizes.pop("token_embd.weight") / max(1, parameters.embedding)
    head = sizes.pop("output.weight", 0.0) / max(1, parameters.head)
    linear = sum(sizes.values()) / max(1, parameters.total - parameters.embedding - parameters.head)
    # A table that is not an output layer is dequantized.
    footprint = Footprint(spec, parameters, linear, table if parameters.tied else HALF, head)
    return Facts(None, "text generation", config["architectures"][0], *known, footprint)


def at_a_glance(folder: Path) -> tuple[str, int | None]:
    """Return the format of a model's weights and the number of its parameters (None if unknown), from the names of its
    files and config.json only.
    """
    config: dict[str, Any] = {}
    parameters = None
    with contextlib.suppress(*_WRONG_CONFIG):
        config = read_json(folder, "config.json")
        parameters = parameters_of(_spec_of(config)).total
    return format_of(config, local_files(folder)), parameters


def local_files(folder: Path) -> dict[str, int]:
    """Return the files of a folder and its subfolders, with their sizes in bytes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _spec_of(config: dict[str, Any]) -> DecoderSpec:
    from quire.models.registry import spec_of

    return spec_of(config)


def _spec_through_transformers(config: dict[str, Any]) -> DecoderSpec | None:
    """Return the sizes of a model that runs through transformers' code, None for any other. Raises ValueError if that
    code cannot run on Quire's attention, as far as the config shows."""
    from quire.models.registry import runs_through_transformers

    if not runs_through_transformers(config):
        return None
    from quire.models.transformers_backend.spec import spec_of

    return spec_of(config)


def _drafter_method(config: dict[str, Any]) -> str | None:
    from quire.models.heads.config import speculative_fields

    try:
        method = speculative_fields(config)["method"]
    except _WRONG_CONFIG:
        return None
    return method if method in _HEADS else None


def _purpose(config: dict[str, Any], spec: DecoderSpec, path: Path) -> tuple[bool, str]:
    """Whether the model generates text, and its purpose. Raises ValueError for a head that is not supported."""
    from quire.models.pooling import describe_pooling, is_pooling_model

    options = ModelConfig()
    if not is_pooling_model(config, path, options):
        return True, "text generation" + _inputs(spec)
    tasks = describe_pooling(config, spec, path, options).tasks
    return False, f"embeddings or scores ({', '.join(tasks)})"


def _inputs(spec: DecoderSpec) -> str:
    """Return the inputs of a model with an image or audio encoder."""
    if spec.media is None or spec.media.encoder is not None:
        return ""
    from quire.multimodal.processor import load_family  # imports the library of pictures

    family = load_family(spec.media, {}, str)
    taken = [_INPUTS[modality] for modality in family.kinds]
    return f" from {', '.join(taken if family.crossed else ['text', *taken])}"


def quantization_problem(config: dict[str, Any]) -> str | None:
    """Return why Quire cannot read the quantized weights of a checkpoint, None if it can."""
    if quantization_of(config) is None:
        return None
    from quire.checkpoints.formats.config import quantization_method  # imports torch

    try:
        quantization_method(config)
    except _WRONG_CONFIG as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError):
        return error_text(error).partition("; supported")[0]  # the list would be long
    return f"its config is not as expected ({error_text(error)})"


def _chat_template(path: Path) -> str | None:
    """Return the chat template for conversations with tools, or the only one. None if it cannot be read."""
    from quire.text.tokenizer import read_chat_templates

    try:
        templates = read_chat_templates(path, read_json(path, "tokenizer_config.json"))
    except _WRONG_CONFIG:  # loading the tokenizer will say what is wrong
        return None
    return _of_tools(templates)


def _of_tools(templates: Mapping[str, Any]) -> str | None:
    template = templates.get("tool_use") or templates.get("default")
    return template if isinstance(template, str) else None


def _licence_of_card(card: Path) -> str | None:
    if not card.is_file():
        return None
    from huggingface_hub import metadata_load

    try:
        licence = (metadata_load(card) or {}).get("license")
    except Exception:  # a broken model card does not affect the model
        return None
    return licence if isinstance(licence, str) else None
