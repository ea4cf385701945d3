"""Prompts of models with a text encoder: the encoder's input, and the decoder's first tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from quire.messages.errors import error_text
from quire.messages.media import Buffer, EncoderLimits, MediaItem, MediaPlace
from quire.messages.sampling_params import SamplingParams
from quire.multimodal.pictures import MediaError
from quire.text.tokenizer import Tokenizer

_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class EncoderPrompt:
    """A prompt in its two parts. text, token_ids: the encoder's; the text is None if only its tokens were given.
    decoder_prompt: like a prompt of a model without an encoder. media: the encoder's input."""

    text: str | None
    token_ids: list[int]
    decoder_prompt: Any
    media: list[MediaItem]


class EncoderPrompts:
    """Reads prompts in vLLM's format: `encoder_prompt` and `decoder_prompt`, or a plain prompt for the encoder."""

    def __init__(
        self, tokenizer: Tokenizer, limits: EncoderLimits, beginning: Sequence[int], vocab_size: int, longest: int
    ) -> None:
        """beginning: the decoder's first tokens. longest: the maximum number of tokens of a text."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._beginning = list(beginning)
        self._vocab_size = vocab_size
        self._longest = longest

    def expand(self, prompt: Any, add_special_tokens: bool, params: SamplingParams) -> EncoderPrompt:
        """prompt: a string, token ids or a dict. params: truncate_prompt_tokens shortens the encoder's text. Raises
        MediaError or TypeError."""
        name = "prompt"
        encoder = prompt
        decoder = None
        salt = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
                name = "encoder_prompt"
                encoder = prompt.get("encoder_prompt")
                decoder = prompt.get("decoder_prompt")
                _refuse_others(prompt, {"encoder_prompt", "decoder_prompt", "cache_salt"})
        text, given = _parts(name, encoder)
        token_ids = self._encoded(name, text, given, add_special_tokens, params)
        key = sha256(b"text " + np.array(token_ids, np.int64).tobytes()).hexdigest()
        ids = Buffer("int64", [len(token_ids)], np.array(token_ids, np.int64).tobytes())
        item = MediaItem(MediaPlace(key, 0, 1, [], crossed=len(token_ids)), "text", {"ids": ids})
        try:
            self._limits.check([item.place])
        except ValueError as error:
            raise MediaError(f"{name}: {error_text(error)}") from error
        start: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        return EncoderPrompt(text, token_ids, {**start, **self._decoder(decoder)}, [item])

    def _encoded(
        self, name: str, text: str | None, given: list[int] | None, add_special_tokens: bool, params: SamplingParams
    ) -> list[int]:
        longest = self._longest
        keep = params.truncate_prompt_tokens
        if keep is not None:
            if params.truncation_side == "left":
                raise MediaError(f"{name}: truncation_side must be right for the text of an encoder")
            if keep > longest:
                raise MediaError(f"truncate_prompt_tokens={keep} is more than the {longest} tokens of the encoder")
            keep = longest if keep == -1 else keep
        elif text is not None and (fewest := self._tokenizer.fewest_tokens(text)) > longest:
            raise MediaError(
                f"{name}: a text of {len(text)} characters has {fewest} tokens or more, and the model's "
                f"encoder reads at most {longest}"
            )
        if given is not None:
            token_ids = given[:keep]
        else:
            assert text is not None
            token_ids = self._tokenizer.encode_parts(text, None, keep, add_special_tokens)[0]
        if not token_ids or text == "":
            raise MediaError(f"{name}: the text for the encoder is empty")
        if len(token_ids) > longest:
            raise MediaError(
                f"{name}: it has {len(token_ids)} tokens, and the model's encoder reads at most {longest};"
                " shorten it, or give truncate_prompt_tokens"
            )
        self._check_ids(name, token_ids)
        return token_ids

    def _decoder(self, prompt: Any) -> dict[str, Any]:
        """Return the decoder's prompt. It starts with the model's usual first tokens, even if a text or tokens are
        given."""
        if prompt is None:
            return {"prompt_token_ids": self._beginning}
        text, given = _parts("decoder_prompt", prompt)
        if given is None:
            return {
                "prompt": text,
                "prompt_token_ids": self._beginning + self._tokenizer.encode(text or "", add_special_tokens=False),
            }
        self._check_ids("decoder_prompt", given)
        start = self._beginning[:1]
        return {"prompt": text, "prompt_token_ids": given if given[:1] == start else start + given}

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        outside = [token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size]
        if outside:
            raise MediaError(
                f"{name}: token id {outside[0]} is out of vocabulary; the model has {self._vocab_size} tokens"
            )


def _parts(name: str, prompt: Any) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt in any form. One of them is not None."""
    text = None
    given = prompt
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        _refuse_others(prompt, _FIELDS)
        text = prompt.get("prompt")
        given = prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name}: prompt must be a string, got {type(text).__name__}")
        if given is None and text is not None:
            return text, None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            f"{name} must be a string, token ids, or a dict with prompt or prompt_token_ids, got "
            f"{type(prompt).__name__}"
        )
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in given):
        raise TypeError(f"{name}: prompt_token_ids must contain only integers")
    return text, list(given)


def _refuse_others(prompt: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(prompt.keys() - known)
    if unknown:
        raise MediaError(f"prompt field {unknown[0]!r} cannot be used with this model, whose encoder reads texts")
