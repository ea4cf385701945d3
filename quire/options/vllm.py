"""The options of vLLM that Quire does not declare, and how each is treated. vllm.toml lists them."""

import difflib
import json
import logging
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.options.declaration import ConfigError, read_json

_logger = logging.getLogger("quire")


class Foreign(NamedTuple):
    """An option of vLLM that Quire does not have.

    accepted: values that need no feature that Quire lacks; None means all values. reason: why the option has no effect.
    switch: on the command line, the option is a flag without a value.
    """

    accepted: tuple[Any, ...] | None
    reason: str = ""
    switch: bool = False


def _foreign(groups: Iterable[Mapping[str, Any]]) -> dict[str, Foreign]:
    """The options of some groups of the file."""
    options: dict[str, Foreign] = {}
    for group in groups:
        accepted = tuple(group["accepted"]) if "accepted" in group else None
        for kind in ("options", "switches", "fields"):
            foreign = Foreign(accepted, group.get("reason", ""), switch=kind == "switches")
            options |= dict.fromkeys(group.get(kind, "").split(), foreign)
    return options


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOT_SUPPORTED: Mapping[str, Foreign] = _foreign(_TABLES["not_supported"])
NO_EFFECT: Mapping[str, Foreign] = _foreign(_TABLES["no_effect"])
# Options of earlier versions: name → (the option that replaced it, or ""; the explanation in the warning).
RETIRED: Mapping[str, tuple[str, str]] = {name: (*entry,) for name, entry in _TABLES["retired"].items()}
SPECULATIVE_FLAGS: Mapping[str, str] = _TABLES["speculative_flags"]  # option -> the field of speculative_config
FOREIGN: Mapping[str, Foreign] = {
    **NOT_SUPPORTED,
    **NO_EFFECT,
    **{name: Foreign(None) for name in (*RETIRED, *SPECULATIVE_FLAGS)},
}
# Fields of speculative_config, likewise. The reason of one that is not supported says what to do instead.
SPECULATIVE_NO_EFFECT = _foreign(_TABLES["speculative_no_effect"])
SPECULATIVE_NOT_SUPPORTED = _foreign(_TABLES["speculative_not_supported"])

# Options whose flags take several values on the command line.
LISTS = frozenset(
    "allowed_media_domains cuda_graph_sizes cudagraph_capture_sizes ignore_patterns lora_target_modules".split()
)

SHORT_FLAGS: Mapping[str, str] = _TABLES["short_flags"]

# vLLM's spellings of values of Quire's own options.
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "attention_backend": {"auto": None},
    "distributed_executor_backend": {"uni": "mp"},
    "hf_token": {True: None},  # the token that the user logged in with
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": dict.fromkeys(("hf", "pt", "gguf", "fastsafetensors", "runai_streamer"), "auto"),
    "max_model_len": {"auto": -1, "-1": -1},
    "model_impl": {"vllm": "quire"},
}

# Values of Quire's own options that only vLLM supports.
UNSUPPORTED_VALUES: Mapping[str, frozenset[str]] = {
    name: frozenset(values.split()) for name, values in _TABLES["unsupported_values"].items()
}


def translate(options: Mapping[str, Any], known: Iterable[str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Translates options as users of vLLM give them to Quire's. An option that is None counts as not given.

    known: the names of Quire's options. others: additional names to suggest in place of an unknown one. Raises
    ConfigError for an option that is unknown or not supported.
    """
    known = frozenset(known)
    result: dict[str, Any] = {}
    overrides: dict[str, Any] = {}  # of config.json
    speculative = _object("speculative_config", options.get("speculative_config"))
    for name, value in options.items():
        if value is None:
            if name not in known and name not in FOREIGN:
                raise ConfigError(unknown(name, [*known, *others]))
        elif name in known:
            result[name] = value
        elif name in RETIRED:
            successor, meaning = RETIRED[name]
            if not successor:
                _logger.warning("%s is retired in vLLM, and has no effect in Quire: %s", name, meaning)
                continue
            _logger.warning("%s is retired in vLLM, and is read as %s in Quire: %s", name, successor, meaning)
            if successor == "hf_overrides":
                overrides[name] = read_json(name, value) if isinstance(value, str) else value
            else:
                result.setdefault(successor, value)
        elif name in SPECULATIVE_FLAGS:
            field = SPECULATIVE_FLAGS[name]
            if speculative.setdefault(field, value) != value:
                raise ConfigError(f"{name}={value!r} contradicts another option: {field}={speculative[field]!r}")
        else:
            _check(name, value, [*known, *others])
    if overrides:
        result["hf_overrides"] = {**overrides, **_object("hf_overrides", result.get("hf_overrides"))}
    if speculative:
        result["speculative_config"] = {n: v for n, v in speculative.items() if _is_read(n, v)}
    return result


def _object(name: str, value: Any) -> Any:
    """A copy of the option's JSON object, which may be given as text."""
    value = read_json(name, value) if isinstance(value, str) else value or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a JSON object, got {value!r}")
    return dict(value)


def _is_read(field: str, value: Any) -> bool:
    """Whether Quire reads a field of speculative_config. Raises ConfigError for one of vLLM that is not supported."""
    refused = SPECULATIVE_NOT_SUPPORTED.get(field)
    if refused is not None and value not in (None, False, *(refused.accepted or ())):
        raise ConfigError(f"speculative_config: {field}={value!r} is not supported by Quire: {refused.reason}")
    if field in SPECULATIVE_NO_EFFECT and value not in (None, False):
        _logger.warning("speculative_config: %s has no effect: %s", field, SPECULATIVE_NO_EFFECT[field].reason)
    return value is not None and refused is None and field not in SPECULATIVE_NO_EFFECT


def _check(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ConfigError unless vLLM has the option and its value needs no feature that Quire lacks."""
    foreign = FOREIGN.get(name)
    if foreign is None:
        raise ConfigError(unknown(name, known))
    if foreign.accepted is None:
        if value is not False:
            _logger.warning("%s has no effect: %s", name, foreign.reason)
        return
    if value in foreign.accepted:
        return
    if (foreign.switch and foreign.accepted == (False,)) or not foreign.accepted:
        raise ConfigError(f"{name} is not supported by Quire yet")
    accepted = " and ".join(json.dumps(neutral) for neutral in foreign.accepted)
    raise ConfigError(f"{name}={value!r} is not supported by Quire yet (supported: {accepted})")


def unknown(name: str, known: Iterable[str]) -> str:
    """The error message for an option that neither Quire nor vLLM has."""
    near = difflib.get_close_matches(name, [*known, *FOREIGN], n=1, cutoff=0.7)
    return f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
