"""The fields of the option speculative_config, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.options.declaration import ConfigError

METHODS = ("ngram", "suffix", "custom_class")
_MOST_DRAFTS = 32
_KINDS: dict[Any, tuple[type, ...]] = {float: (float, int), int: (int,), bool: (bool,)}  # of values


@dataclass(frozen=True)
class SpeculativeOptions:
    """method: who proposes drafts. model: what the method needs, such as the import path of a class.
    num_speculative_tokens: the most drafts of a request in a step. adaptive: whether it gets fewer when they are not
    worth their cost; else it always gets as many as the method finds.

    prompt_lookup_min, prompt_lookup_max: of ngram, how many of a text's last tokens must and may be found earlier in
    the text. suffix_decoding_...: of suffix, see docs/speculation.md.
    """

    method: str
    num_speculative_tokens: int = 0
    model: str | None = None
    adaptive: bool = True
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for a field that is unknown, missing or wrong."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"speculative_config has no field {name!r}: {', '.join(known)}")
            kind = _KINDS.get(known[name], (str,))
            if type(value) not in kind:
                raise ConfigError(f"speculative_config: {name} has the wrong type: {value!r}")
        values = dict(given)
        if "method" not in values and "." in values.get("model", "").replace("/", ""):
            values["method"] = "custom_class"
        if values.get("method") not in METHODS:
            raise ConfigError(
                f"speculative_config: method must be one of {', '.join(METHODS)}, got {values.get('method')!r}"
            )
        if values["method"] == "ngram":
            longest = values.get("prompt_lookup_max") or values.get("prompt_lookup_min") or 5
            values["prompt_lookup_max"] = longest
            values["prompt_lookup_min"] = values.get("prompt_lookup_min") or longest
        if values["method"] == "suffix":
            values.setdefault("num_speculative_tokens", values.get("suffix_decoding_max_tree_depth", 24))
        if values["method"] == "custom_class" and not values.get("model"):
            raise ConfigError("speculative_config: custom_class needs model, the import path of the class")
        options = cls(**values)
        if not 1 <= options.num_speculative_tokens <= _MOST_DRAFTS:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens must be from 1 to {_MOST_DRAFTS}, got "
                f"{options.num_speculative_tokens}"
            )
        if not 1 <= max(options.prompt_lookup_min, 1) <= max(options.prompt_lookup_max, 1):
            raise ConfigError("speculative_config: prompt_lookup_min must be at least 1 and at most prompt_lookup_max")
        return options
