"""From what a caller says to EngineCoreRequests: validation, tokenizing, defaults."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.metrics.logging import logger
from quire.text.tokenizer import Tokenizer


class PromptFields(TypedDict, total=False):
    """A prompt as a dict: its text, or its token ids, and what keeps its cached prefix apart from others'."""

    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str


Prompt = str | list[int] | PromptFields


@dataclass(frozen=True)
class ProcessedRequest:
    """A prompt, ready to run: one core request for each of its n completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    core_requests: list[EngineCoreRequest]


class Processor:
    """Validates and tokenizes. What it lets through, the engine core can run."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, vocab_size: int, generation_config: dict[str, Any], seed: int
    ) -> None:
        """vocab_size: the model's; generation_config: the checkpoint's, {} for neutral defaults."""
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size
        self.generation_config = generation_config
        self._seeds = random.Random(seed)
        eos = generation_config.get("eos_token_id")
        listed = [eos] if isinstance(eos, int) else list(eos or [])
        self.eos_token_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else (listed or [None])[0]
        self._more_eos = [t for t in listed if t != self.eos_token_id]

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own recommendation, neutral where it has none."""
        known = {name: self.generation_config.get(name) for name in ("temperature", "top_p", "top_k", "min_p")}
        if self.generation_config.get("max_new_tokens"):
            known["max_tokens"] = self.generation_config["max_new_tokens"]
        if self.generation_config.get("do_sample") is False:
            known = {"temperature": 0.0}
        penalty = self.generation_config.get("repetition_penalty", 1.0)
        if penalty not in (None, 1.0):
            logger.warning("generation_config.json asks for repetition_penalty=%s, which is left out", penalty)
        return SamplingParams(**{**{name: value for name, value in known.items() if value is not None}, **changes})

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """Raises ValueError or TypeError naming what is wrong with the prompt or the parameters."""
        text, token_ids, cache_salt = self._tokenize(prompt, add_special_tokens)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        params = msgspec.convert(msgspec.to_builtins(params), SamplingParams)  # a copy, checked: it may have changed
        if not token_ids:
            raise ValueError("the prompt is empty")
        worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
        if not 0 <= worst < self.vocab_size:
            raise ValueError(f"token id {worst} is outside the vocabulary of {self.vocab_size}")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output: "
                f"max_model_len is {self.max_model_len}"
            )
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        core_requests = [
            EngineCoreRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=params,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_id=None if params.ignore_eos else self.eos_token_id,
                stop_token_ids=[*(params.stop_token_ids or []), *([] if params.ignore_eos else self._more_eos)],
                arrival_time=time.monotonic(),
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(request_id, text, token_ids, params, core_requests)

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt) of any form of prompt."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens), None
        if isinstance(prompt, dict):
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}")
            text = prompt.get("prompt")
            unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
            if unknown:
                raise ValueError(f"prompt field {unknown[0]!r} is not supported by Quire yet")
            if prompt.get("prompt_token_ids") is not None:
                return text, self._checked(prompt["prompt_token_ids"]), salt
            if isinstance(text, str):
                return text, self.tokenizer.encode(text, add_special_tokens), salt
            raise ValueError("a prompt given as a dict needs 'prompt' (a string) or 'prompt_token_ids'")
        return None, self._checked(prompt), None

    @staticmethod
    def _checked(token_ids: object) -> list[int]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
            raise TypeError(f"a prompt must be a string, token ids or a dict, got {type(token_ids).__name__}")
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in token_ids):
            raise TypeError("prompt_token_ids must contain only integers")
        return list(token_ids)
