"""What requests may say: OpenAI's fields and vLLM's. Types are strict; what is not listed is ignored, logged once."""

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quire.messages.sampling_params import RequestOutputKind, SamplingParams

MAX_N = 1024  # completions of a prompt
MAX_SEQUENCES = 16_384  # completions of all prompts of a request
MAX_INT = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
TokenIds = Annotated[list[Count], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Logprobs = Annotated[int, Field(ge=-1, le=MAX_INT)]

_NOT_YET = "is not supported by Quire yet"
_UNSUPPORTED = {
    **dict.fromkeys(
        """structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
        guided_whitespace_pattern structural_tag response_format use_beam_search length_penalty prompt_embeds
        logits_processors kv_transfer_params thinking_token_budget""".split(),
        _NOT_YET,
    ),
    "suffix": "is not supported: the models complete text, they do not fill gaps",
}
_UNSUPPORTED_IN_CHAT = {
    **_UNSUPPORTED,
    **dict.fromkeys("functions function_call audio web_search_options echo mm_processor_kwargs".split(), _NOT_YET),
}


def _fail(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, message)


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="A served model's name; the first if left out.")

    def unsupported(self) -> tuple[str, str] | None:
        """(field, why) of what would change the answer, but cannot."""
        return None

    def unknown(self) -> list[str]:
        return list(self.model_extra or ())


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Say the usage so far in every chunk, too.")


def _check_bias(value: Any) -> Any:
    """By hand, as pydantic would list all that is wrong, however many."""

    def is_right(token_id: str, bias: Any) -> bool:
        digits = token_id.isascii() and token_id.isdigit() and len(token_id) <= 10
        return digits and type(bias) in (int, float) and -100 <= bias <= 100

    if not isinstance(value, dict) or not all(is_right(*item) for item in value.items()):
        raise _fail("bias", "Input should have token ids as keys, such as '50256', and numbers from -100 to 100")
    return {int(token_id): bias for token_id, bias in value.items()}


_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "description": "Token id → what is added to its logit.",
}
LogitBias = Annotated[Any, AfterValidator(_check_bias), WithJsonSchema(_BIAS_SCHEMA)]


def _check_sendable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise _fail("range", "Integers should fit in 64 bits") from error
    return value


ExtraArguments = Annotated[dict[str, Any], AfterValidator(_check_sendable)]


class Generation(Body):
    """What completions and chats have in common: how to sample, what to return. null is as if left out."""

    stream: bool | None = Field(None, description="Send server-sent events as tokens come.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Completions of each prompt; needs a temperature if > 1.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; default: as the model recommends.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 and -1 consider all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Equal seeds draw equal tokens; -1: none.")
    stop: str | Strings | None = Field(None, description="Strings before which to end.")
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = Field(None, description="Logprobs at each place of the prompt; -1: of all.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Shorten the prompt to so many tokens; -1: to what leaves room for output."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side from which truncate_prompt_tokens removes tokens: left (default) or right."
    )
    add_special_tokens: bool | None = Field(None, description="Frame a text prompt as the tokenizer says.")
    priority: int | None = Field(
        None, ge=-MAX_INT, le=MAX_INT, description="The lowest comes first; not 0 needs --scheduling-policy priority."
    )
    cache_salt: str | None = Field(None, min_length=1, description="Share cached prefixes with the same salt only.")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Logprobs name tokens 'token_id:42'.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="Unless X-Request-Id says another.")
    vllm_xargs: ExtraArguments | None = Field(None, description="extra_args for plugins that process logits.")
    user: str | None = Field(None, description="Ignored.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def max_tokens_field(self) -> str:
        """The name of the field that bounds the output."""
        return "max_tokens"

    def given(self) -> dict[str, Any]:
        """Of SamplingParams' fields, those that the request sets."""
        names = (name for name in SamplingParams.__struct_fields__ if name in type(self).model_fields)
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return {**values, "output_kind": kind, "extra_args": self.vllm_xargs}

    def refused(self, table: dict[str, str]) -> tuple[str, str] | None:
        for name, value in (self.model_extra or {}).items():
            if name in table and value not in (None, False, "", [], {}, {"type": "text"}):
                return name, table[name]
        if self.stream_options is not None and not self.stream:
            return "stream_options", "is only allowed when stream is true"
        if self.stream and self.prompt_logprobs is not None and (self.n or 1) > 1:
            return "prompt_logprobs", "cannot be streamed for n > 1"
        return None

    def unknown(self) -> list[str]:
        return [name for name in self.model_extra or () if name not in _UNSUPPORTED_IN_CHAT]


def _check_prompt(value: Any) -> Any:
    """By hand for the same reason."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value) or all(type(item) is str for item in value):
            return value
        if all(type(item) is list for item in value) and all(type(token) is int for item in value for token in item):
            return value
    raise _fail("prompt", "Input should be a string, token ids, a list of strings or a list of lists of token ids")


_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ],
    "description": "A text, the token ids of one, or a list of either.",
}


class CompletionRequest(Generation):
    prompt: Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Count | None = Field(None, description="16 if left out; 0 needs echo.")
    echo: bool | None = Field(None, description="Begin with the prompt; its logprobs as well, if asked for.")
    logprobs: Logprobs | None = Field(None, description="Logprobs of so many of the likeliest tokens at each place.")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Only equal to n.")

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    def given(self) -> dict[str, Any]:
        values = super().given()
        if self.echo and self.logprobs is not None:
            counts = (self.logprobs, self.prompt_logprobs or 0)
            values["prompt_logprobs"] = -1 if -1 in counts else max(counts)
        return values

    def unsupported(self) -> tuple[str, str] | None:
        if self.best_of not in (None, self.n or 1):
            return "best_of", "is not supported, unless it equals n"
        if self.max_tokens == 0 and not self.echo:
            return "max_tokens", "should be at least 1, unless echo is true"
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            return "echo", "with logprobs cannot be streamed for n > 1"
        return self.refused(_UNSUPPORTED)


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "text":
            raise _fail("part", "Only text parts are supported")
        return value


class Message(BaseModel):
    """Further fields (name, reasoning_content, ...) go to the chat template."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={"anyOf": [{"required": ["content"]}, {"properties": {"role": {"const": "assistant"}}}]},
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Objects | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise _fail("content", f"A message of role {self.role} should have content")
        return self


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]

# Arguments of the renderer that a request sets by other fields, or may not set.
_RESERVED_KWARGS = """messages template chat_template tools documents add_generation_prompt continue_final_message
    tokenize""".split()


def _check_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := [name for name in value if name in _RESERVED_KWARGS]:
        raise _fail("reserved", f"'{reserved[0]}' cannot be set here")
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]


class Rendering(Body):
    """How the chat template renders a conversation."""

    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer; the default.")
    continue_final_message: bool | None = Field(None, description="End within the last message, to go on with it.")
    chat_template: str | None = Field(None, description="Only if the server trusts templates of requests.")
    chat_template_kwargs: TemplateArguments | None = None
    tools: Objects | None = Field(None, description="Variable of the template.")
    documents: Objects | None = Field(None, description="The same.")
    reasoning_effort: str | None = Field(None, description="The same.")


class ChatRequest(Generation, Rendering):
    messages: Messages
    max_tokens: Positive | None = Field(None, description="As max_completion_tokens, which counts if both are given.")
    max_completion_tokens: Positive | None = Field(None, description="Default: what the model's context has room for.")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")
    tool_choice: str | dict[str, Any] | None = Field(None, description='Only "none" if there are tools.')

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def given(self) -> dict[str, Any]:
        values = super().given()
        values.pop("logprobs", None)
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        return values

    def unsupported(self) -> tuple[str, str] | None:
        if self.top_logprobs and not self.logprobs:
            return "top_logprobs", "is only allowed when logprobs is true"
        if self.tools and self.tool_choice != "none":
            return "tools", f"{_NOT_YET} unless tool_choice is 'none'"
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice", f"{_NOT_YET}, but for 'none'"
        return self.refused(_UNSUPPORTED_IN_CHAT)


class TokenizeRequest(Rendering):
    """Of a prompt, or of the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [  # null is as if left out
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    tokens: TokenIds


class AbortRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    request_ids: Annotated[Strings, Field(min_length=1)] = Field(description="Ids of responses, or X-Request-Ids.")
