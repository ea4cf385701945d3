"""Requests for embeddings and scores: tokenizes prompts and text pairs, and converts results to outputs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.processor import MEDIA_FIELDS, ProcessedRequest, Processor, Prompt, PromptTooLongError
from quire.messages.engine import EngineCoreRequest
from quire.messages.media import MediaItem
from quire.messages.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.messages.step import Pooled
from quire.models.pooling import PoolingDescription

_NOTHING = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)  # for requests that only pool


class PoolingError(RuntimeError):
    """The engine failed to run a request. The message contains the reason."""


@dataclass(frozen=True)
class Pair:
    """Two texts that a cross-encoder reads at once. variables: of the template that renders them."""

    first: str
    second: str
    variables: Mapping[str, Any] = field(default_factory=dict)


class PoolingProcessor:
    """Validates and tokenizes requests for a model that pools. The engine core can run every request that passes."""

    def __init__(
        self,
        processor: Processor,
        description: PoolingDescription,
        token_types: int,
        hidden_size: int,
        render_pair: Callable[[Pair], str] | None = None,
    ) -> None:
        """token_types: see DecoderSpec. render_pair: renders the texts that a cross-encoder reads into one."""
        self.processor = processor
        self.description = description
        self.token_types = token_types
        self.heads = description.heads
        self.hidden_size = hidden_size
        self.render_pair = render_pair

    def process(
        self,
        request_id: str,
        prompt: Prompt | Pair,
        params: PoolingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        prompt_name: str | None = None,
        truncation_side: str | None = None,
    ) -> ProcessedRequest:
        """prompt_name: selects one of the checkpoint's prompts to prepend; None for the default one. truncation_side:
        the side from which truncate_prompt_tokens removes tokens, left or right (default).

        Raises ValueError or TypeError, whose message names the wrong field."""
        params = params or PoolingParams()
        if not isinstance(params, PoolingParams):
            raise TypeError(f"pooling_params must be PoolingParams, got {type(params).__name__}")
        params = msgspec.structs.replace(params)  # a validated copy
        self._check(params)
        self.processor.check_priority(priority)
        keep = self._kept_tokens(params)
        longest = self.processor.max_model_len
        from_left = truncation_side == "left"
        text: str | None = None
        salt: str | None = None
        media = list[MediaItem]()
        rotary = b""
        if isinstance(prompt, Pair) and self.render_pair is not None:
            prompt = self.render_pair(prompt)
        if isinstance(prompt, Pair):
            text = prompt.second
            token_ids = self._pair(prompt, keep, from_left)
        else:
            prompt = self._with_prompt(prompt, prompt_name)
            if isinstance(prompt, dict) and not MEDIA_FIELDS.isdisjoint(prompt):
                prompt, media, rotary = self.processor.with_media(prompt, add_special_tokens, keep)
            text = _text_of(prompt)
            tokenizer = self.processor.tokenizer
            if text is not None and keep is not None:  # special tokens stay at the end
                fields = prompt if isinstance(prompt, dict) else {}
                part = self.processor.cut(text, keep, from_left)
                token_ids = tokenizer.encode_parts(part, None, keep, add_special_tokens, from_left)[0]
                prompt = {**fields, "prompt_token_ids": token_ids}
            elif text is not None and len(text) > longest:
                self._check_room(tokenizer.fewest_tokens(text), "at least ")
                self.processor.check_count(text)
            text, token_ids, salt = self.processor.tokenize(prompt, add_special_tokens, keep, from_left)
        kinds = self.token_types if isinstance(prompt, Pair) else 1
        self.processor.check_tokens(token_ids, self.processor.vocab_size * max(1, kinds))
        self._check_room(len(token_ids))
        core_request = EngineCoreRequest(
            request_id,
            token_ids,
            None,
            0,
            0,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=salt,
            pooling_params=params,
            media=media,
            rotary_positions=rotary,
        )
        return ProcessedRequest(request_id, text, token_ids, _NOTHING, [core_request])

    def _check(self, params: PoolingParams) -> None:
        if params.task is None:
            params.task = self.description.tasks[0]  # type: ignore[assignment]
        elif params.task not in self.heads:
            raise ValueError(f"task {params.task!r} is not one of this model's: {', '.join(self.heads)}")
        pooler = self.heads[str(params.task)]
        if params.dimensions is not None:
            if pooler.is_classifier:
                raise ValueError("dimensions is for embeddings, which this model does not make")
            layers = pooler.layers or pooler.of_tokens
            size = layers[-1].out_features if layers else self.hidden_size
            if params.dimensions > size:
                raise ValueError(
                    f"dimensions must be at most {size}, the length of this model's embeddings, got {params.dimensions}"
                )
        if not pooler.reads_last_token_only:
            params.skip_reading_prefix_cache = True  # hidden states of all tokens are needed

    def _kept_tokens(self, params: PoolingParams) -> int | None:
        keep = params.truncate_prompt_tokens
        longest = self.processor.max_model_len
        if keep is not None and keep > longest:
            raise ValueError(
                f"truncate_prompt_tokens value ({keep}) is greater than max_model_len ({longest}). "
                "Please, select a smaller truncation size."
            )
        return longest if keep == -1 else keep

    def _check_room(self, num_tokens: int, how: str = "") -> None:
        longest = self.processor.max_model_len
        if num_tokens > longest:
            raise PromptTooLongError(
                f"the prompt has {how}{num_tokens} tokens, but max_model_len is {longest}; shorten it, or set "
                "truncate_prompt_tokens"
            )

    def _with_prompt(self, prompt: Prompt, name: str | None) -> Prompt:
        files = self.description.files
        if name is not None and name not in files.prompts:
            known = ", ".join(sorted(files.prompts)) or "none"
            raise ValueError(f"prompt_name {name!r} is not one of the model's prompts: {known}")
        prefix = files.prompts.get(name or files.default_prompt or "", "")
        text = _text_of(prompt)
        if text is None:
            if name is not None:
                raise ValueError("prompt_name is for texts; put the tokens of the prompt before the token ids instead")
            return prompt
        return {**prompt, "prompt": prefix + text} if isinstance(prompt, dict) else prefix + text

    def _pair(self, pair: Pair, keep: int | None, from_left: bool) -> list[int]:
        if keep is None:
            for text in (pair.first, pair.second):
                self.processor.check_count(text)
        parts = self.processor.tokenizer.encode_parts(pair.first, pair.second, keep, from_left=from_left)
        token_ids, kinds = parts
        if self.token_types > 1:  # see Decoder.embed
            size = self.processor.vocab_size
            return [token_id + kind * size for token_id, kind in zip(token_ids, kinds, strict=True)]
        return token_ids


def _text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt, None if it has token ids."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", "") if prompt.get("prompt_token_ids") is None else []
    return prompt if isinstance(prompt, str) else None


def array(pooled: Pooled) -> npt.NDArray[np.float32]:
    """Return the result as an array [out] or [tokens, out]."""
    return np.frombuffer(pooled.data, np.float32).reshape(pooled.shape)


def result(output: RequestOutput) -> npt.NDArray[np.float32]:
    """Return the result of a finished request. Raises PoolingError if it failed."""
    completion = output.outputs[0]
    if completion.pooled is None:
        raise PoolingError(str(completion.stop_reason or completion.finish_reason))
    return array(completion.pooled)


def tensor_output(values: npt.NDArray[np.float32]) -> PoolingOutput:
    import torch

    return PoolingOutput(torch.from_numpy(values.copy()))


def pooling_request_output(
    output: RequestOutput, kind: Callable[[npt.NDArray[np.float32]], Any] = tensor_output
) -> PoolingRequestOutput:
    """kind: converts an array to `outputs`. Raises PoolingError if the request failed."""
    made = kind(result(output))
    return PoolingRequestOutput(output.request_id, made, output.prompt_token_ids, output.num_cached_tokens)
