"""The fields of the option speculative_config, with vLLM's names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.config.declaration import AtLeast1, ConfigError, read_object

HOST_METHODS = "ngram", "suffix", "custom_class"
DEVICE_METHODS = "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "replay"
METHODS = (*HOST_METHODS, *DEVICE_METHODS)
_MTP = "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp"
_OTHER_NAMES = {**dict.fromkeys(_MTP, "mtp"), "ngram_gpu": "ngram"}  # vLLM's
_IMPORT_PATH = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+")
_MOST_DRAFTS = 32


@dataclass(frozen=True)
class SpeculativeOptions:
    """method: the drafting method, None to use the one in the config of `model`. model: depends on the method: the
    import path of a class, or the directory or name of a draft model or of a drafter's head, at `revision`.
    num_speculative_tokens: the maximum number of drafts of a request per step, 0 to use the config of `model`.
    adaptive: whether to propose fewer drafts when they are not worth their cost; otherwise as many as the method finds.
    max_model_len: the maximum length of a text with its drafts; longer ones get none.

    parallel_drafting, quantization, draft_tensor_parallel_size: for a draft model: whether it guesses all drafts in one
    forward, how its weights are quantized, and whether it is sharded like the model or replicated on each rank (1).
    prompt_lookup_min, prompt_lookup_max: for ngram, the minimum and maximum number of a text's last tokens to look up
    earlier in the text. suffix_decoding_...: for suffix, see docs/speculation.md.

    acceptance_rates, draft_method: for replay, which is for benchmarks. The drafts of `draft_method` are accepted with
    given probabilities, regardless of their content: the draft at place i with the probability acceptance_rates[i], if
    those before it were accepted; the last rate applies to all further places. So the head of `model`, whose weights
    may be dummies, has its real cost, and the texts are meaningless. After reading, `method` is the draft method; it
    remains replay if there is neither draft_method nor model, and then drafts are arbitrary tokens without cost.
    """

    method: str | None = None
    num_speculative_tokens: int = 0
    model: str | None = None
    adaptive: bool = True
    revision: str | None = None
    max_model_len: AtLeast1 | None = None
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

    def __post_init__(self) -> None:
        for name, value in self._defaults().items():
            object.__setattr__(self, name, value)
        if not all(0 <= rate <= 1 for rate in self.acceptance_rates) or (self.acceptance_rates and not self.on_device):
            raise ConfigError("acceptance_rates must be numbers from 0 to 1, and not for host methods")
        fewest = int(not self.on_device)  # 0 uses the head's config
        if not fewest <= self.num_speculative_tokens <= _MOST_DRAFTS:
            raise ConfigError(
                f"num_speculative_tokens must be from 1 to {_MOST_DRAFTS}, got {self.num_speculative_tokens}"
            )
        if not 1 <= max(self.prompt_lookup_min, 1) <= max(self.prompt_lookup_max, 1):
            raise ConfigError("prompt_lookup_min must be at least 1 and at most prompt_lookup_max")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ConfigError for an unknown, missing or invalid field."""
        return read_object("speculative_config", given, cls)

    @property
    def on_device(self) -> bool:
        """Whether a separate drafter generates the drafts."""
        return self.method not in HOST_METHODS

    def _defaults(self) -> dict[str, Any]:
        """Return the method by Quire's name, and the fields whose defaults depend on it. Raises ConfigError."""
        method = self._method()
        if method == "custom_class" and not self.model:
            raise ConfigError("custom_class needs model, the import path of the class")
        if method == "ngram":
            longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
            shortest = self.prompt_lookup_min or longest
            return {"method": method, "prompt_lookup_max": longest, "prompt_lookup_min": shortest}
        if method == "suffix":
            drafts = self.num_speculative_tokens or self.suffix_decoding_max_tree_depth
            return {"method": method, "num_speculative_tokens": drafts}
        return {"method": method}

    def _method(self) -> str | None:
        """Return the given method, or the one that the model implies. Raises ConfigError."""
        method = self.method
        if method == "replay":
            if not self.acceptance_rates:
                raise ConfigError("replay needs acceptance_rates, one for each place of a draft")
            if self.model or self.draft_method:
                method = self.draft_method
        if self.model in ("ngram", "[ngram]"):
            return "ngram"
        if method is None:
            return "custom_class" if _IMPORT_PATH.fullmatch(self.model or "") else None
        method = _OTHER_NAMES.get(method, method)
        if method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        return method
