"""The fields of the option speculative_config, with vLLM's names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from quire.config.declaration import ConfigError

HOST_METHODS = "ngram", "suffix", "custom_class"
DEVICE_METHODS = "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "replay"
METHODS = (*HOST_METHODS, *DEVICE_METHODS)
_MTP = "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"
_OTHER_NAMES = {**dict.fromkeys(_MTP, "mtp"), "ngram_gpu": "ngram"}  # vLLM's
_IMPORT_PATH = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+")
_MOST_DRAFTS = 32
_KINDS: dict[Any, tuple[type, ...]] = {  # of values
    float: (float, int),
    int: (int,),
    int | None: (int,),
    bool: (bool,),
    tuple[float, ...]: (list, tuple),
}


@dataclass(frozen=True)
class SpeculativeOptions:
    """method: who proposes drafts, None if the config of `model` is to say it. model: what the method needs: the import
    path of a class, or the directory or name of a draft model or of a drafter's head, at `revision`.
    num_speculative_tokens: the most drafts of a request in a step, 0 if the config of `model` is to say it. adaptive:
    whether it gets fewer when they are not worth their cost; else it always gets as many as the method finds.
    max_model_len: how many tokens a text may have with its drafts; longer ones get none.

    parallel_drafting, quantization, draft_tensor_parallel_size: of a draft model: whether it guesses all drafts in one
    forward, how its weights are quantized, and whether its ranks share it (like the model's) or have it whole (1).
    prompt_lookup_min, prompt_lookup_max: of ngram, how many of a text's last tokens must and may be found earlier in
    the text. suffix_decoding_...: of suffix, see docs/speculation.md.

    acceptance_rates, draft_method: of replay, which is for benchmarks. The drafts of `draft_method` are accepted with
    given probabilities, whatever they are: the draft at place i with the probability acceptance_rates[i], if those
    before it were accepted; the last rate is that of all further places. So the head of `model`, whose weights may be
    dummies, costs what it costs, and the texts mean nothing. Once read, the method is that of the drafts; it remains
    replay if there is neither draft_method nor model, where drafts are arbitrary tokens that cost nothing.
    """

    method: str | None = None
    num_speculative_tokens: int = 0
    model: str | None = None
    adaptive: bool = True
    revision: str | None = None
    max_model_len: int | None = None
    parallel_drafting: bool = False
    quantization: str | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    acceptance_rates: tuple[float, ...] = ()
    draft_method: str | None = None

    @property
    def on_device(self) -> bool:
        """Whether a drafter makes the drafts, next to the model."""
        return self.method not in HOST_METHODS

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
        options = cls(**_with_method(given))
        options._check()
        return options

    def _check(self) -> None:
        """Raises ConfigError for a value out of range."""
        rates = self.acceptance_rates
        if not all(type(rate) in (float, int) and 0 <= rate <= 1 for rate in rates) or (rates and not self.on_device):
            message = "speculative_config: acceptance_rates must be numbers from 0 to 1, and not for host methods"
            raise ConfigError(message)
        fewest = int(not self.on_device)  # 0 leaves it to the head's config
        if not fewest <= self.num_speculative_tokens <= _MOST_DRAFTS:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens must be from 1 to {_MOST_DRAFTS}, got "
                f"{self.num_speculative_tokens}"
            )
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"speculative_config: max_model_len must be at least 1, got {self.max_model_len}")
        if not 1 <= max(self.prompt_lookup_min, 1) <= max(self.prompt_lookup_max, 1):
            raise ConfigError("speculative_config: prompt_lookup_min must be at least 1 and at most prompt_lookup_max")


def _with_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the method by Quire's name, and with the defaults that depend on it. Raises ConfigError."""
    values = dict(given)
    if values.get("method") == "replay":
        if not values.get("acceptance_rates"):
            raise ConfigError("speculative_config: replay needs acceptance_rates, one for each place of a draft")
        if values.get("model") or values.get("draft_method"):
            values["method"] = values.pop("draft_method", None)
    model = values.get("model", "")
    given_method = _method(values.get("method"), model)
    values["method"] = method = _OTHER_NAMES.get(str(given_method), given_method)
    if given_method is not None and method not in METHODS:
        raise ConfigError(f"speculative_config: method must be one of {', '.join(METHODS)}, got {given_method!r}")
    if method == "ngram":
        longest = values.get("prompt_lookup_max") or values.get("prompt_lookup_min") or 5
        values["prompt_lookup_max"] = longest
        values["prompt_lookup_min"] = values.get("prompt_lookup_min") or longest
    if method == "suffix":
        values.setdefault("num_speculative_tokens", values.get("suffix_decoding_max_tree_depth", 24))
    if method == "custom_class" and not model:
        raise ConfigError("speculative_config: custom_class needs model, the import path of the class")
    return values


def _method(given: str | None, model: str) -> str | None:
    """The method that is given, or that the model implies."""
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if given is None and _IMPORT_PATH.fullmatch(model):
        return "custom_class"
    return given
