"""What the server answers, in OpenAI's shapes: the types that the code builds and /openapi.json describes.

As in vLLM, a whole answer has every key, null where there is nothing to say; chunks of a stream have fewer.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # before Python 3.12, pydantic does not take that of typing

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails | None]


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


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: None
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class TokenIdLogprob(TypedDict):
    token_id: int
    logprob: float
    rank: int | None


class SampledTokenIdLogprob(TokenIdLogprob):
    top_logprobs: list[TokenIdLogprob]


class TokenIdLogprobs(TypedDict):
    content: list[SampledTokenIdLogprob]


class ChatFunction(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ChatFunction


class AssistantMessage(TypedDict):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: NotRequired[str]  # the older name of reasoning
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


class ChatResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: None
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: int


class Aborted(TypedDict):
    aborted: int
