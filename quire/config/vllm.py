"""The options of vLLM that Quire does not declare, and how each is treated: vllm.toml and vllm_refused.toml."""

import difflib
import json
import logging
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.config.compilation import read_compilation
from quire.config.declaration import ConfigError, read_json

_logger = logging.getLogger("quire")


class Foreign(NamedTuple):
    """An option of vLLM that Quire does not have.

    accepted: values that do not require a feature missing in Quire; None means all values. reason: why the option has
    no effect, or is an error. claim: the name of the test that checks the reason. switch: on the command line, the
    option is a flag without a value.
    """

    accepted: tuple[Any, ...] | None
    reason: str = ""
    claim: str = ""
    switch: bool = False


def _foreign(groups: Iterable[Mapping[str, Any]], of_switches: tuple[Any, ...] | None = None) -> dict[str, Foreign]:
    """Return the options of some groups of a file. of_switches: the values that switches accept."""
    options: dict[str, Foreign] = {}
    for group in groups:
        given = tuple(group["accepted"]) if "accepted" in group else None
        for kind, accepted in (("options", given), ("fields", given), ("never", ()), ("switches", of_switches)):
            foreign = Foreign(accepted, group["reason"], group["claim"], switch=kind == "switches")
            options |= dict.fromkeys(group.get(kind, "").split(), foreign)
    return options


def _read(name: str) -> Any:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_TABLES = _read("vllm.toml")
NOT_SUPPORTED: Mapping[str, Foreign] = _foreign(_read("vllm_refused.toml")["not_supported"], (False,))
NO_EFFECT: Mapping[str, Foreign] = _foreign(_TABLES["no_effect"])
# Options of earlier versions: name → (the option that replaced it, or ""; the explanation in the warning).
RETIRED: Mapping[str, tuple[str, str]] = {name: (*entry,) for name, entry in _TABLES["retired"].items()}
# Options that set a field of another option: name → (the other option, its field).
FIELD_FLAGS: Mapping[str, tuple[str, str]] = {
    name: (option, field) for option, flags in _TABLES["field_flags"].items() for name, field in flags.items()
}
# Values of options that set other options: name → value → those.
IMPLIED: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    name: {entry["value"]: entry["options"] for entry in _TABLES["implied"] if entry["option"] == name}
    for name in dict.fromkeys(entry["option"] for entry in _TABLES["implied"])
}
_SWITCHES = frozenset(_TABLES["switches"].split())
FOREIGN: Mapping[str, Foreign] = {
    **{name: Foreign(None, switch=name in _SWITCHES) for name in (*RETIRED, *FIELD_FLAGS, *IMPLIED)},
    "compilation_config": Foreign(None),
    **NOT_SUPPORTED,
    **NO_EFFECT,
}
# Fields of speculative_config, likewise. The reason of an unsupported one describes the alternative.
SPECULATIVE_NO_EFFECT = _foreign(_TABLES["speculative_no_effect"])
SPECULATIVE_NOT_SUPPORTED = _foreign(_TABLES["speculative_not_supported"])

# Options whose flags take several values on the command line.
LISTS = frozenset("cuda_graph_sizes ignore_patterns sleep_preserve_parameter_names".split())

SHORT_FLAGS: Mapping[str, str] = _TABLES["short_flags"]

# vLLM's spellings of values of Quire's own options.
VALUES: Mapping[str, Mapping[Any, Any]] = {
    "all2all_backend": {
        "deepep_v2": "deepep_high_throughput",
        **dict.fromkeys(_TABLES["all2all_backends"].split(), "auto"),
    },
    "attention_backend": {"auto": None},
    "distributed_executor_backend": {"uni": "mp"},
    "hf_token": {True: None},  # the token of the user's login
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"},
    "load_format": dict.fromkeys(("hf", "pt", "gguf", "fastsafetensors", "runai_streamer"), "auto"),
    "max_model_len": {"auto": -1, "-1": -1},
    "model_impl": {"vllm": "quire"},
    "quantization": {"fp8_per_channel": "fp8", "fp8_per_tensor": "fp8"},
}

# Values of Quire's own options that only vLLM supports.
UNSUPPORTED_VALUES: Mapping[str, frozenset[str]] = {
    name: frozenset(values.split()) for name, values in _TABLES["unsupported_values"].items()
}


def translate(options: Mapping[str, Any], known: Iterable[str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Translate options in vLLM's form to Quire's. An option that is None is treated as omitted. known: the names of
    Quire's options. others: additional names to suggest for an unknown one. Raises ConfigError for an unknown or
    unsupported option.
    """
    known = frozenset(known)
    result: dict[str, Any] = {}
    implied: dict[str, Any] = {}  # by other options; explicit options take precedence
    objects = _objects(options)
    for name, value in options.items():
        if value is None:
            if name not in known and name not in FOREIGN:
                raise ConfigError(unknown(name, [*known, *others]))
        elif name in known:
            result[name] = value
        elif name in RETIRED:
            _replace(name, value, result, implied)
        elif name in FIELD_FLAGS:
            _set_field(name, value, objects)
        elif name == "compilation_config":
            implied = {**read_compilation(value), **implied}
        elif (of_value := _implied(name, value)) is not None:
            implied |= of_value
        else:
            _check(name, value, [*known, *others])
    if parser := objects["structured_outputs_config"].pop("reasoning_parser", None):
        implied["reasoning_parser"] = parser
    _merge_overrides(result, implied)
    objects["speculative_config"] = _speculative(objects["speculative_config"])
    return {**implied, **result, **{name: value for name, value in objects.items() if value}}


def _set_field(name: str, value: Any, objects: Mapping[str, dict[str, Any]]) -> None:
    """Set the field of another option that an option maps to. Raises ConfigError if the field has a different value."""
    option, field = FIELD_FLAGS[name]
    if objects[option].setdefault(field, value) != value:
        raise ConfigError(f"{name}={value!r} contradicts another option: {field}={objects[option][field]!r}")


def _replace(name: str, value: Any, result: dict[str, Any], implied: dict[str, Any]) -> None:
    """Add the replacement of an option of earlier versions, and log that the option is deprecated."""
    successor, meaning = RETIRED[name]
    if not successor:
        _logger.warning("%s is retired in vLLM, and has no effect in Quire: %s", name, meaning)
        return
    _logger.warning("%s is retired in vLLM, and is read as %s in Quire: %s", name, successor, meaning)
    if successor == "hf_overrides":
        value = read_json(name, value) if isinstance(value, str) else value
        implied["hf_overrides"] = {**implied.get("hf_overrides", {}), name: value}
    else:
        result.setdefault(successor, value)


def _merge_overrides(result: dict[str, Any], implied: dict[str, Any]) -> None:
    """Move the fields of hf_overrides that other options imply to the option itself, unless it has them."""
    if fields := implied.pop("hf_overrides", None):
        result["hf_overrides"] = {**fields, **_object("hf_overrides", result.get("hf_overrides"))}


def _implied(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the other options that this value of an option sets: {} if it sets none, None if other tables treat the
    option."""
    of_values = IMPLIED.get(name, {})
    try:
        found = of_values.get(value)
    except TypeError:  # an unhashable value is none of the listed ones
        found = None
    return {} if found is None and of_values and name not in NOT_SUPPORTED and name not in NO_EFFECT else found


def _objects(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Copy the options whose fields have their own flags."""
    return {name: _object(name, options.get(name)) for name in dict.fromkeys(name for name, _ in FIELD_FLAGS.values())}


def _object(name: str, value: Any) -> Any:
    """Return a copy of the option's JSON object, which may be given as text."""
    value = read_json(name, value) if isinstance(value, str) else value or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a JSON object, got {value!r}")
    return dict(value)


def _speculative(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of speculative_config that Quire reads. Raises ConfigError for an unsupported field of vLLM."""
    return {field: value for field, value in given.items() if _is_read(field, value)}


def _is_read(field: str, value: Any) -> bool:
    """Whether Quire reads a field of speculative_config. Raises ConfigError for an unsupported field of vLLM."""
    refused = SPECULATIVE_NOT_SUPPORTED.get(field)
    if refused is not None and value not in (None, False, *(refused.accepted or ())):
        raise ConfigError(f"speculative_config: {field}={value!r} is not supported by Quire: {refused.reason}")
    if field in SPECULATIVE_NO_EFFECT and value not in (None, False):
        _logger.warning("speculative_config: %s has no effect: %s", field, SPECULATIVE_NO_EFFECT[field].reason)
    return value is not None and refused is None and field not in SPECULATIVE_NO_EFFECT


def _check(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ConfigError unless vLLM has the option and its value requires no feature missing in Quire."""
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
        raise ConfigError(f"{name} is not supported by Quire yet: {foreign.reason}")
    accepted = " and ".join(json.dumps(neutral) for neutral in foreign.accepted)
    raise ConfigError(f"{name}={value!r} is not supported by Quire yet (supported: {accepted}): {foreign.reason}")


def unknown(name: str, known: Iterable[str]) -> str:
    """Return the error message for an option that neither Quire nor vLLM has."""
    near = difflib.get_close_matches(name, [*known, *FOREIGN], n=1, cutoff=0.7)
    return f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
