"""The supported architectures, by the name in a checkpoint's config.json. registry.toml lists them."""

import difflib
import re
import tomllib
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from quire.checkpoints.config_fields import checked, read
from quire.models.spec import Architecture, DecoderSpec, HfConfig, bidirectional
from quire.multimodal.spec import MediaSpec

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Functions, or their places in quire.models.architectures: only the module that is used is imported.
ARCHITECTURES: dict[str, Architecture | str] = _TABLES["decoders"]
ENCODERS: dict[str, Architecture | str] = _TABLES["encoders"]
PARTS: dict[str, Architecture | str] = _TABLES["parts"]
POOLING: dict[str, Architecture | str] = _TABLES["pooling"]
PREPROCESSING: dict[str, str] = _TABLES["preprocessing"]
_HEADS = r"(Model|For(MaskedLM|SequenceClassification|TokenClassification|(Process)?RewardModel))$"


def _architecture(name: str) -> Architecture | None:
    found = _listed(name)
    return resolve_name(f"quire.models.architectures.{found}") if isinstance(found, str) else found


def _listed(name: str) -> Architecture | str | None:
    """Return the architecture with this name. For a model without a head or with another head, return its base
    architecture."""
    if found := ARCHITECTURES.get(name) or POOLING.get(name) or PARTS.get(name):
        return found
    base = re.sub(_HEADS, "", name)
    if base == name:
        return None
    decoder = ARCHITECTURES.get(f"{base.removesuffix('Text')}ForCausalLM")
    return ENCODERS.get(base) or decoder or ARCHITECTURES.get(f"{base}ForConditionalGeneration")


def _verified(architecture: Architecture, config: HfConfig) -> DecoderSpec:
    """Return the config's spec. Raises TypeError for numbers that are null in the config."""
    spec = architecture(config)
    if config.get("is_causal") is False and not spec.is_encoder:
        spec = bidirectional(spec)
    parts: list[object] = [
        spec,
        *{id(p): p for p in (*spec.mixers, *spec.mlps, *spec.rotary) if p is not None}.values(),
    ]
    for part in parts:
        for field in fields(part) if is_dataclass(part) else ():
            value = getattr(part, field.name)
            if is_dataclass(value) and not isinstance(value, type):
                parts.append(value)
            numbers = (int, float) if field.type is float else (int,) if field.type is int else ()
            if numbers and (not isinstance(value, numbers) or isinstance(value, bool)):
                raise TypeError(f"{field.name} is {value!r}")
    return spec


def runs_through_transformers(config: HfConfig) -> bool:
    """Whether Quire lacks the architecture of a checkpoint, and the installed transformers has a causal language model
    with its name. transformers is used only if Quire lacks it."""
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if not names or any(_listed(name) is not None for name in names) or find_spec("transformers") is None:
        return False
    return bool(_asked("is_text_model", {**config, "architectures": names})) and _with_encoder(config) is None


def _asked(function: str, config: HfConfig) -> Any:
    """Return a function's answer from transformers' code; None if no process can be started for it. Raises
    ValueError."""
    from quire.multimodal.through_transformers import call

    with suppress(OSError):
        return call(f"text_models:{function}", config)
    return None


_OF_SPEECH = r"^(talker|code2wav|token2wav)\."
# Tensors of encoders, whose names are transformers' concern: all but those of text models.
_OF_ENCODERS = r"^(?!(.*\.)?(language_model|text_model|lm_head)\.|(model\.)?(layers|embed_tokens|norm)\.)"


def _with_encoder(config: HfConfig) -> DecoderSpec | None:
    """Return the spec of a model that sees or hears, whose text model is one of Quire's and whose encoder is
    transformers' code; None for other models. Raises ValueError."""
    if not any(isinstance(value, dict) for value in config.values()) or find_spec("transformers") is None:
        return None
    text = _asked("text_model", dict(config))
    architecture = None if text is None else _architecture(text["architectures"][0])
    if text is None or architecture is None:
        return None
    spec = read(checked(text), text["architectures"][0], partial(_verified, architecture))
    layers = tuple(layer for layer in _asked("further_layers", dict(config)) or () if layer >= 0)
    preprocessing = PREPROCESSING.get(str(config.get("model_type")), "")
    media = MediaSpec("transformers", config, layers, preprocessing=preprocessing)
    return replace(spec, tie_embeddings=None, media=media, ignored=(*spec.ignored, _OF_ENCODERS, _OF_SPEECH))


def spec_of(config: HfConfig) -> DecoderSpec:
    """Return the spec of a checkpoint's config. Raises ValueError for an unsupported architecture, and ConfigError for
    a missing field or one of a wrong type."""
    config = checked(config)
    names = config.get("architectures") or []
    for name in names:
        architecture = _architecture(name)
        if architecture is not None:
            return read(config, name, partial(_verified, architecture))
    if (found := _with_encoder(config)) is not None:
        return found
    near = difflib.get_close_matches(names[0], ARCHITECTURES, n=1, cutoff=0.4) if names else []
    raise ValueError(
        f"architecture {', '.join(names) or '(none named in config.json)'} is not supported; supported: "
        f"{', '.join(sorted([*ARCHITECTURES, *(f'{name}Model' for name in ENCODERS)]))}"
        + "; many others run through transformers' code (model_impl='auto' or 'transformers'), if it is installed"
        + (f"; the nearest is {near[0]}" if near else "")
    )
