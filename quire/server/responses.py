"""Response types in OpenAI's format, which the code builds and /openapi.json describes.

As in vLLM, a complete response has every key, with null for missing values; chunks of a stream have fewer.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # before Python 3.12, pydantic does not accept typing.TypedDict

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class ErrorResponse(TypedDict):
    error: dict[str, str | None]  # message, type, param, code


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: NotRequired[dict[str, int] | None]


class _Answer(TypedDict):
    """The common keys of complete responses to completions and chats."""

    id: str
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    usage: Usage
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: None
    metrics: dict[str, Any] | None


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    routed_experts: NotRequired[None]
    weight_versions: NotRequired[None]


class CompletionResponse(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[dict[str, str]]  # name, arguments
    custom: NotRequired[dict[str, str]]  # name, input


class AssistantMessage(TypedDict):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: dict[str, str] | None  # name, arguments
    reasoning: str | None
    reasoning_content: NotRequired[str]  # older name of reasoning
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None
    weight_versions: None


class ChatResponse(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class TranscriptSegment(TypedDict):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcript(TypedDict):
    """task, language, duration and segments: only with verbose_json. The formats text, srt and vtt are plain text."""

    text: str
    usage: dict[str, Any]
    task: NotRequired[str]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[TranscriptSegment]]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
