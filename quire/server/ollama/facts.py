"""The facts about the served model in Ollama's API: its details, size, digest and architecture."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.checkpoints.format_names import format_of, gguf_format
from quire.checkpoints.gguf import GgufFile, read_gguf
from quire.config.engine import ModelConfig
from quire.models.description import describe
from quire.models.parameters import parameters_of
from quire.server.fields import TABLES

_INFO: dict[str, list[str]] = TABLES["ollama"]["model_info"]
_MOST_HASHED = 64 << 20  # bytes; of a larger file, the modification time is hashed instead
_MOST_LICENSE = 256 << 10  # bytes
_SCALARS = (str, int, float)
_CARD_LICENSE = re.compile(r"^license:[ \t]*['\"]?([\w.+-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Facts:
    """details: Ollama's details. size: bytes of the files. digest: 64 hexadecimal digits that identify the files.
    modified_at: in ISO format. model_info: with GGUF's key names. lists: only for GGUF files, see GgufFile.
    license: the text or the name of the license, "" if unknown."""

    details: dict[str, Any]
    size: int
    digest: str
    modified_at: str
    model_info: dict[str, Any]
    lists: dict[str, Any]
    license: str


def facts_of(directory: Path, options: ModelConfig) -> Facts:
    """Collect the facts. Reads the headers of the files, and at most 64 MiB of each file to hash it.

    directory: the model's directory or GGUF file.
    """
    description = describe(directory, options)
    gguf = read_gguf(directory) if directory.is_file() else None
    files = sorted(_files(directory, gguf))
    count = parameters_of(description.spec).total
    family = _family(str(description.config.get("model_type", "")), gguf)
    if gguf is None:
        quantization = format_of(description.config, [path.name for path in files])
        quantization = re.sub(r"^(safetensors|pytorch) ?", "", quantization)
    else:
        quantization = gguf_format(gguf).removeprefix("GGUF").strip()
    metadata = _info(description.config, family) if gguf is None else gguf.metadata
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": count,
        f"{family}.context_length": description.spec.max_positions,
        **{name: value for name, value in metadata.items() if isinstance(value, _SCALARS)},
    }
    info.pop("tokenizer.chat_template", None)  # returned as the field `template`
    details = {
        "parent_model": "",
        "format": "safetensors" if gguf is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": size_name(count),
        "quantization_level": quantization,
    }
    stats = [path.stat() for path in files]
    return Facts(
        details,
        size=sum(stat.st_size for stat in stats),
        digest=_digest(files),
        modified_at=datetime.fromtimestamp(max(stat.st_mtime for stat in stats), UTC).isoformat(),
        model_info=info,
        lists={name: value for name, value in metadata.items() if not isinstance(value, _SCALARS)},
        license=_license(directory, gguf),
    )


def as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists of `Facts` as JSON values."""
    return {name: v.tolist() if isinstance(v, np.ndarray) else list(v) for name, v in values.items()}


def size_name(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 4.49M, 1.5B, 8B."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count / unit:.{digits if count % unit else 0}f}{letter}"
    return str(count)


def derived_digest(digest: str, *parts: object) -> str:
    """Return the digest of a model that consists of another model and additional parts."""
    return hashlib.sha256(msgspec.json.encode([digest, *parts])).hexdigest()


def _family(model_type: str, gguf: GgufFile | None) -> str:
    return model_type if gguf is None else str(gguf.metadata.get("general.architecture", model_type))


def _files(directory: Path, gguf: GgufFile | None) -> list[Path]:
    if gguf is not None:
        return [directory, *{tensor.file for tensor in gguf.tensors.values()} - {directory}]
    return [path for path in directory.iterdir() if path.is_file()]


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(msgspec.json.encode([[path.name, _content(path)] for path in files])).hexdigest()


def _content(path: Path) -> str:
    """Return an identifier of a file's content. In the hub's cache, the file name is one."""
    real = path.resolve()
    if real.parent.name == "blobs":
        return real.name
    stat = real.stat()
    if stat.st_size > _MOST_HASHED:
        return f"{stat.st_size} {stat.st_mtime_ns}"
    return hashlib.sha256(real.read_bytes()).hexdigest()


def _info(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    text = config.get("text_config")
    places = [text if isinstance(text, Mapping) else {}, config]
    found: dict[str, Any] = {}
    for name, fields in _INFO.items():
        values = (place.get(field) for place in places for field in fields)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[f"{family}.{name}"] = value
    return found


def _license(directory: Path, gguf: GgufFile | None) -> str:
    if gguf is not None:
        named = gguf.metadata.get("general.license")
        return named if isinstance(named, str) else ""
    for path in sorted(directory.glob("LICEN[SC]E*")):
        if path.is_file() and path.stat().st_size <= _MOST_LICENSE:
            return path.read_text(encoding="utf-8", errors="replace")
    card = directory / "README.md"
    if card.is_file() and card.stat().st_size <= _MOST_LICENSE:
        head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
        if match := _CARD_LICENSE.search(head):
            return match[1]
    return ""
