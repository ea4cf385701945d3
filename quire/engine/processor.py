"""Turns prompts and parameters into EngineCoreRequests: validation, tokenizing, defaults."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from quire.config.kv_transfer import KVTransferOptions
from quire.engine.transfer_params import offer, read_transfer
from quire.messages.engine import EngineCoreRequest
from quire.messages.errors import error_text
from quire.messages.lora import Adapter
from quire.messages.media import MediaItem
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import ThinkingLimits
from quire.parsing.reasoning import ReasoningFormat
from quire.text.long_texts import end_with
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.multimodal.processor import MediaProcessor
    from quire.sampling.logits_processors import LogitsProcessor

# Sampling parameters that a generation_config.json may recommend.
_RECOMMENDED = """repetition_penalty presence_penalty frequency_penalty temperature top_p top_k min_p""".split()
# Sampling parameters for chats with a GGUF file that recommends none. Few files recommend any, and temperature 1 is too
# high for most quantized models.
GGUF_CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}


class PromptFields(TypedDict, total=False):
    """A prompt as a dict: its text or its token ids. Only prompts with equal cache_salt share cached prefixes."""

    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str
    multi_modal_data: dict[str, Any]  # by modality (image, video): PIL images or numpy arrays, one or several
    multi_modal_uuids: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    prompt_embeds: Any  # replaces tokens: a tensor or an array [tokens, hidden]
    encoder_prompt: Any  # for a text encoder: a string, token ids, or a dict with either
    decoder_prompt: Any  # the same forms; None uses the model's default


Prompt = str | list[int] | PromptFields
ENCODER_FIELDS = frozenset(("encoder_prompt", "decoder_prompt"))
MEDIA_FIELDS = ENCODER_FIELDS | {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"}
PROMPT_END = 32  # last prompt tokens, which show whether the answer begins with thinking
CUT_MARGIN = 4096  # tokens between the cut in a long text and the tokens that truncation keeps


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one prompt or several."""
    if isinstance(prompts, (str, dict)) or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def refuse_arguments(**arguments: Any) -> None:
    """Raises ValueError for an argument of vLLM that Quire does not support, unless its value is neutral."""
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{name} is not supported by Quire yet")


class PromptTooLongError(ValueError):
    """The prompt leaves no room for output within max_model_len."""


@dataclass(frozen=True)
class ProcessedRequest:
    """A validated, tokenized prompt, with one core request for each of its n completions.

    encoder_prompt, encoder_prompt_token_ids: for a model with a text encoder, otherwise None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    core_requests: list[EngineCoreRequest]
    kv_transfer_params: dict[str, Any] | None = None  # returned with the answer
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


def end_of_sequence(tokenizer: Tokenizer, generation_config: dict[str, Any]) -> list[int]:
    """Return the end-of-sequence tokens, the tokenizer's first."""
    listed = generation_config.get("eos_token_id")
    found = [tokenizer.eos_token_id, *([listed] if isinstance(listed, int) else listed or [])]
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


class Processor:
    """Validates and tokenizes requests. The engine core can run every request that passes."""

    def __init__(  # noqa: PLR0913  # assembles its parts
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        generation_config: dict[str, Any],
        seed: int,
        max_logprobs: int = 20,
        plugins: "Sequence[type[LogitsProcessor]]" = (),
        in_process: bool = True,
        scheduling_policy: str = "fcfs",
        reasoning: ReasoningFormat | None = None,
        compresses: bool = False,
        transfer: KVTransferOptions | None = None,
        media: "MediaProcessor | None" = None,
        chat_defaults: Mapping[str, Any] = MappingProxyType({}),
        generates: bool = True,
    ) -> None:
        """vocab_size: the model's. generation_config: the checkpoint's; {} gives neutral defaults. max_logprobs: -1 for
        no limit. in_process: whether the model runs in this process; parameters may then contain functions and other
        objects that cannot be sent. reasoning: the format of the model's thinking, None if unknown. compresses: whether
        the engine has kv_compression. transfer: the options for KV transfer between engines. media: for a model that
        accepts images or embeddings. chat_defaults: sampling parameters for chats if generation_config has none.
        generates: whether the model generates text."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        self.plugins = plugins
        self.in_process = in_process
        self.scheduling_policy = scheduling_policy
        self.reasoning = reasoning
        self.compresses = compresses
        self.transfer = transfer
        self.media = media
        self._texts = None if media is None else media.texts
        self.generation_config = generation_config
        self.chat_defaults = chat_defaults
        self.generates = generates
        self._seeds = random.Random(seed)
        self.eos_token_ids = end_of_sequence(tokenizer, generation_config)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None

    def default_sampling_params(self, chat: bool = False, **changes: Any) -> SamplingParams:
        """Return the checkpoint's recommended parameters, with neutral values for those that it does not recommend. As
        in vLLM, do_sample has no effect. chat: whether they are for a chat, which may have other defaults."""
        known = {name: self.generation_config.get(name) for name in _RECOMMENDED}
        recommended: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        if chat and not recommended:
            recommended = dict(self.chat_defaults)
        if self.generation_config.get("max_new_tokens"):
            recommended["max_tokens"] = self.generation_config["max_new_tokens"]
        return SamplingParams(**{**recommended, **changes})

    @property
    def uses_chat_defaults(self) -> bool:
        """Whether chats have other default sampling parameters than completions."""
        return self.default_sampling_params(chat=True) != self.default_sampling_params()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        add_special_tokens: bool = True,
        adapter: Adapter | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenize. Raises ValueError or TypeError, whose message names the wrong field."""
        if not self.generates:
            raise ValueError("this model makes embeddings or scores, and generates no text")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        self.check_priority(priority)
        params = params.clone()  # cloning validates again: the caller may have changed fields
        self._check_params(params)
        self.check_length(prompt, params)
        self.check_count(prompt, params)
        keep = self._kept_tokens(params)
        from_left = params.truncation_side != "right"
        media = list[MediaItem]()
        rotary = b""
        encoded = None
        if self._texts is not None:
            encoded = self._texts.expand(prompt, add_special_tokens, params)
            prompt = encoded.decoder_prompt
            media = encoded.media
        elif isinstance(prompt, dict) and not MEDIA_FIELDS.isdisjoint(prompt):
            prompt, media, rotary = self.with_media(prompt, add_special_tokens, keep)
        if self.media is not None and self.media.needs_media and not media:
            raise ValueError("multi_modal_data: this model needs a sound in each prompt")
        if adapter is not None:
            media = [item.of_adapter(adapter.key) for item in media]
        text, token_ids, cache_salt = self.tokenize(prompt, add_special_tokens, keep, from_left)
        self.check_tokens(token_ids, self.vocab_size)
        self._check_room(len(token_ids))
        room = self.max_model_len - len(token_ids)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        bad_words = self._bad_words(params)
        thinking = self._thinking_limits(params, token_ids)
        transfer = read_transfer(request_id, params.extra_args, self.transfer)
        # With n completions, the prompt's logprobs are computed only once.
        later_params = params if params.prompt_logprobs is None or params.n == 1 else params.clone(prompt_logprobs=None)
        core_requests = [
            EngineCoreRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling_params=params if index == 0 else later_params,
                seed=(seed + index + 2**63) % 2**64 - 2**63,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_id=None if params.ignore_eos else self.eos_token_id,
                stop_token_ids=[*(params.stop_token_ids or []), *([] if params.ignore_eos else self.eos_token_ids[1:])],
                arrival_time=time.monotonic(),
                priority=priority,
                cache_salt=cache_salt,
                bad_words=bad_words,
                thinking=thinking,
                adapter=adapter,
                transfer=transfer,
                media=media,
                rotary_positions=rotary,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(
            request_id,
            text,
            token_ids,
            params,
            core_requests,
            offer(transfer, self.transfer),
            None if encoded is None else encoded.text,
            None if encoded is None else encoded.token_ids,
        )

    @property
    def shortest_prompt(self) -> Prompt:
        """Return a prompt of one token, with audio if the model needs it."""
        if self.media is None or not self.media.needs_media:
            return [0]
        return {"prompt_token_ids": [0], "multi_modal_data": {"audio": self.media.silence}}

    def check_priority(self, priority: int) -> None:
        """Raises ValueError for a priority that is wrong or not enabled."""
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise ValueError(f"priority must be an integer of 64 bits, got {priority!r}")
        if priority and self.scheduling_policy != "priority":
            raise ValueError(
                f"Got priority {priority} but priority scheduling is not enabled; start the engine with "
                "scheduling_policy='priority' (--scheduling-policy priority), or leave priority at 0"
            )

    def check_tokens(self, token_ids: list[int], limit: int) -> None:
        """Raises ValueError if there are no tokens, or ids that are negative or not below `limit`."""
        if not token_ids:
            raise ValueError("the prompt is empty")
        extreme = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
        if not 0 <= extreme < limit:
            raise ValueError(f"token id {extreme} is out of vocabulary; the model has {self.vocab_size} tokens")

    def check_length(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises PromptTooLongError if the prompt is certainly too long. Does not tokenize it.

        params: with truncate_prompt_tokens, no prompt is too long. EncoderPrompts checks prompts for a text encoder.
        """
        if (params is not None and params.truncate_prompt_tokens is not None) or self._texts is not None:
            return
        token_ids: object = prompt
        text: object = prompt
        if isinstance(prompt, dict):
            token_ids = prompt.get("prompt_token_ids")
            text = prompt.get("prompt")
        if isinstance(token_ids, list):
            self._check_room(len(token_ids))
        elif isinstance(text, str) and len(text) > self.max_model_len:  # no token is shorter than a byte
            fewest = self.tokenizer.fewest_tokens(text)
            if fewest >= self.max_model_len:
                raise PromptTooLongError(
                    f"the prompt has {len(text)} characters, which are {fewest} tokens or more and leave no room for "
                    f"output: max_model_len is {self.max_model_len}"
                )

    def check_count(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises PromptTooLongError for a long text as soon as too many tokens are found. This takes as long as
        tokenizing them. The arguments are those of `check_length`."""
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if self._texts is not None or (params is not None and params.truncate_prompt_tokens is not None):
            return
        if isinstance(text, str) and len(self.cut(text, self.max_model_len, from_left=False)) < len(text):
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and the first of them are more tokens "
                f"than max_model_len, which is {self.max_model_len}"
            )

    def cut(self, text: str, keep: int, from_left: bool) -> str:
        """Return the part of a text that contains the kept tokens. Tokens near a cut may differ from those of the whole
        text, so the text is cut far away from the kept tokens."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return end_with(encode, text, keep + CUT_MARGIN, from_left)

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens, which leaves no room for output: "
                f"max_model_len is {self.max_model_len}"
            )

    def _check_params(self, params: SamplingParams) -> None:
        """Check the parameters that depend on the model or the engine: vocabulary, limits, plugins, processes."""
        named_token_ids = params.logprob_token_ids
        sample_logprobs = params.logprobs if named_token_ids is None else None
        for name, option in (("sample", sample_logprobs), ("prompt", params.prompt_logprobs)):
            count = self.vocab_size if option == -1 else option or 0
            if count > self.max_logprobs:
                raise ValueError(
                    f"Requested {name} logprobs of {count}, which is greater than max allowed: {self.max_logprobs}"
                )
        for name, token_ids in (
            ("logit_bias", params.logit_bias),
            ("logprob_token_ids", named_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            outside = [token_id for token_id in token_ids or () if not 0 <= token_id < self.vocab_size]
            if outside:
                raise ValueError(
                    f"token_id(s) {outside} in {name} contain out-of-vocab token ids. Vocabulary size: "
                    f"{self.vocab_size}"
                )
        if not all(0 <= token_id < self.vocab_size for token_id in params.allowed_token_ids or ()):
            raise ValueError("allowed_token_ids contains out-of-vocab token id!")
        if params.kv_compression and not self.compresses:
            raise ValueError(
                "kv_compression needs an engine that compresses; start it with kv_compression "
                "(--kv-compression), or leave it out"
            )
        for plugin in self.plugins:
            plugin.validate_params(params)
        if not self.in_process:
            _check_can_be_sent(params)

    def _kept_tokens(self, params: SamplingParams) -> int | None:
        """Return how many tokens truncate_prompt_tokens keeps; -1 leaves room for max_tokens of output."""
        keep = params.truncate_prompt_tokens
        if keep is None:
            return None
        if keep > self.max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens value ({keep}) is greater than max_model_len "
                f"({self.max_model_len}). Please, select a smaller truncation size."
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return min(keep, self.max_model_len - 1)  # leaves room for one output token

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token ids of each bad word, at the beginning of a text and after a space.

        As in vLLM, the form after a space is used only if it has equally many tokens and a different first token.
        Otherwise the space is a separate token, followed by the tokens of the first form.
        """
        sequences: list[list[int]] = []
        for word in params.bad_words or ():
            bare = self.tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not bare:
                raise ValueError(f"bad_words entries must tokenize to at least one token, got {word!r}.")
            sequences.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
        outside = [token_id for token_ids in sequences for token_id in token_ids if token_id >= self.vocab_size]
        if outside:
            raise ValueError(
                f"The model vocabulary size is {self.vocab_size}, but the following tokens were specified "
                f"as bad: {outside}. All token id values should be integers satisfying: 0 <= token_id < "
                f"{self.vocab_size}."
            )
        return sequences

    def _thinking_limits(self, params: SamplingParams, prompt_token_ids: list[int]) -> ThinkingLimits | None:
        """Return where the answer's thinking ends, if the request limits it or constrains the text after it."""
        reasoning = self.reasoning
        budget = params.thinking_token_budget
        if reasoning is None and budget is not None:
            message = "thinking_token_budget needs the format of the model's thinking; start with reasoning_parser"
            raise ValueError(message)
        if reasoning is None or (budget is None and params.structured_outputs is None):
            return None
        start_ids, end_ids, closing_ids = (
            self.tokenizer.encode(text, add_special_tokens=False) if text else []
            for text in (reasoning.start[0], reasoning.end[0], reasoning.closing)
        )
        prompt = self.tokenizer.decode(prompt_token_ids[-PROMPT_END:], skip_special_tokens=False).rstrip()
        is_over = prompt.endswith(reasoning.end)  # as with enable_thinking=False
        # An answer with channels does not begin in the last channel.
        is_open = reasoning.is_open(prompt) or (reasoning.whole is not None and not is_over)
        # A grammar waits for the end marker; a tool call does not end the thinking before it.
        calls = reasoning.implicit_ends if params.structured_outputs is None else ()
        call_ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in calls]
        return ThinkingLimits(end_ids, [] if is_over else start_ids, is_open, budget, closing_ids, call_ids)

    def tokenize(
        self, prompt: Prompt, add_special_tokens: bool, keep: int | None, from_left: bool
    ) -> tuple[str | None, list[int], str | None]:
        """Return (text, token ids, cache salt) of a prompt in any form. keep: how many tokens to keep, None for all.
        from_left: whether to keep the last tokens instead of the first."""
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens, keep, from_left), None
        if isinstance(prompt, dict):
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}")
            text = prompt.get("prompt")
            unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
            if unknown:
                raise ValueError(f"prompt field {unknown[0]!r} is not supported by Quire yet")
            if prompt.get("prompt_token_ids") is not None:
                return text, self._checked(prompt["prompt_token_ids"], keep, from_left), salt
            if isinstance(text, str):
                return text, self._encode(text, add_special_tokens, keep, from_left), salt
            raise ValueError("a prompt given as a dict needs 'prompt' (a string) or 'prompt_token_ids'")
        return None, self._checked(prompt, keep, from_left), None

    def with_media(
        self, prompt: PromptFields, add_special_tokens: bool, keep: int | None
    ) -> tuple[PromptFields, list[MediaItem], bytes]:
        """Return the prompt with its media replaced by tokens, the media, and the prompt's rotary positions if they are
        special."""
        if given := sorted(ENCODER_FIELDS.intersection(prompt)):
            raise ValueError(f"{given[0]}: this model has no encoder of texts; give it prompt or prompt_token_ids")
        fields: dict[str, Any] = {name: prompt.get(name) for name in MEDIA_FIELDS}
        kept: Any = {name: value for name, value in prompt.items() if name not in MEDIA_FIELDS}
        if not fields["multi_modal_data"] and fields["prompt_embeds"] is None:
            return kept, [], b""
        if self.media is None:
            if fields["prompt_embeds"] is not None:
                raise ValueError("prompt_embeds needs an engine with enable_prompt_embeds")
            raise ValueError("multi_modal_data: this model takes text only")
        if keep is not None:
            raise ValueError("truncate_prompt_tokens cannot be used with multi_modal_data or prompt_embeds")
        if fields["prompt_embeds"] is not None:
            expanded = self.media.embeddings(fields["prompt_embeds"])
        else:
            text = kept.get("prompt") if kept.get("prompt_token_ids") is None else kept["prompt_token_ids"]
            if not isinstance(text, str | list):
                raise ValueError("a prompt with multi_modal_data needs 'prompt' or 'prompt_token_ids'")
            uuids = fields["multi_modal_uuids"] or {}
            kwargs = fields["mm_processor_kwargs"]
            expanded = self.media.expand(text, fields["multi_modal_data"], uuids, kwargs, add_special_tokens)
        kept["prompt_token_ids"] = expanded.token_ids
        return kept, expanded.media, expanded.rotary_positions

    def _encode(self, text: str, add_special_tokens: bool, keep: int | None, from_left: bool) -> list[int]:
        bound = self.tokenizer.length_bound if keep is not None and len(text) > self.max_model_len else None
        if keep is not None and bound is not None and bound.counts_spaces:
            # Only this part of a long text can contain kept tokens.
            text = _end(text, (keep + CUT_MARGIN) * bound.bytes_per_token, from_left)
        if keep is not None:
            text = self.cut(text, keep, from_left)
        token_ids: list[int] = _end(self.tokenizer.encode(text, add_special_tokens), keep, from_left)
        return token_ids

    @staticmethod
    def _checked(token_ids: object, keep: int | None, from_left: bool) -> list[int]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
            raise TypeError(f"a prompt must be a string, token ids or a dict, got {type(token_ids).__name__}")
        kept = list(_end(token_ids, keep, from_left))
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in kept):
            raise TypeError("prompt_token_ids must contain only integers")
        return kept


def _end(sequence: Any, length: int | None, last: bool) -> Any:
    """Return the last or the first `length` items of a sequence; all of them if `length` is None."""
    if length is None:
        return sequence
    return sequence[-length:] if last else sequence[:length]


def _check_can_be_sent(params: SamplingParams) -> None:
    """Raises ValueError for parameters that cannot be sent to the model's processes."""
    if params.logits_processors:
        raise ValueError(
            "logits_processors are functions of this process, but the model runs in others; write "
            "a plugin (option logits_processors), or use a single rank"
        )
    try:
        msgspec.msgpack.encode(params.extra_args)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"extra_args cannot be sent to the processes of the model: {error_text(error)}"
        raise ValueError(message) from error
