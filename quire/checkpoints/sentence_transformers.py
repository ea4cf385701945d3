"""Reads sentence-transformers' files, which describe what is applied after a model: pooling, dense layers, prompts.

modules.json lists the parts, each with a folder of its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.hub import read_json
from quire.layers.specs import DenseSpec, Pooling
from quire.messages.errors import error_text

_MODES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}
_FLAGS: dict[str, Pooling] = {  # in the older form of the pooling config
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}


@dataclass(frozen=True)
class SentenceTransformer:
    """The content of the files. pooling: None if no part pools, so that each token has a vector. prompts: prefixes of
    inputs, by name. is_sparse: a vector over the vocabulary (SPLADE). is_late_interaction: a part is PyLate's, so
    vectors of tokens are compared."""

    pooling: Pooling | None = None
    layers: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    is_sparse: bool = False
    is_late_interaction: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_transformer(directory: Path) -> SentenceTransformer | None:
    """Read the files of a directory. Returns None if there are none. Raises ValueError for an unsupported part, and
    ModelNotFoundError for a file that cannot be read."""
    if directory.is_file() or not (directory / "modules.json").is_file():
        return None
    found: dict[str, Any] = {}
    for library, kind, folder in _parts(directory):
        found["is_late_interaction"] = found.get("is_late_interaction", False) or library == "pylate"
        config = read_json(folder, "config.json")
        if kind in ("Transformer", "MLMTransformer"):
            settings = read_json(folder, "sentence_bert_config.json")
            found["max_tokens"] = settings.get("max_seq_length")
        elif kind == "Pooling":
            found["pooling"] = _pooling(config)
        elif kind == "Dense":
            found["layers"] = (*found.get("layers", ()), _dense(folder.relative_to(directory), config))
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind == "SpladePooling":
            if config.get("pooling_strategy", "max") != "max":
                raise ValueError("SpladePooling: only the pooling_strategy max is supported")
            found |= {"pooling": "max", "is_sparse": True}
        elif kind != "Dropout":
            raise ValueError(f"modules.json has a part {kind}, which is not supported")
    texts = read_json(directory, "config_sentence_transformers.json")
    return SentenceTransformer(
        **found, prompts=texts.get("prompts") or {}, default_prompt=texts.get("default_prompt_name")
    )


def _parts(directory: Path) -> list[tuple[str, str, Path]]:
    """Return the library, the kind and the folder of each part."""
    try:
        modules = json.loads((directory / "modules.json").read_text(encoding="utf-8"))
        types = [str(module["type"]).split(".") for module in modules]
        folders = [_inside(directory, module["path"]) for module in modules]
        return [(type[0], type[-1], folder) for type, folder in zip(types, folders, strict=True)]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelNotFoundError(f"{directory}/modules.json cannot be read: {error_text(error)}") from error


def _inside(directory: Path, path: str) -> Path:
    folder = (directory / path).resolve()
    if not folder.is_relative_to(directory.resolve()):
        raise ValueError(f"the folder {path!r} is outside of the model's directory")
    return directory / path


def _pooling(config: Mapping[str, Any]) -> Pooling:
    if config.get("include_prompt", True) is False:
        raise ValueError("a pooling that leaves out the prompt's tokens is not supported")
    mode = config.get("pooling_mode")
    modes = [_MODES.get(mode)] if isinstance(mode, str) else [name for flag, name in _FLAGS.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] is None:
        raise ValueError(f"the pooling {mode or ' and '.join(map(str, modes)) or 'without a mode'} is not supported")
    return modes[0]


def _dense(folder: Path, config: Mapping[str, Any]) -> DenseSpec:
    name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation function {name} of a dense layer is not supported")
    if config.get("use_residual"):
        raise ValueError("a dense layer with a residual connection is not supported")
    sizes = config["in_features"], config["out_features"]
    return DenseSpec("linear", *sizes, bool(config.get("bias", True)), ACTIVATIONS[name], folder=str(folder))
