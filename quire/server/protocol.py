"""The fields of requests: OpenAI's and vLLM's.

Every vLLM field that could change the output is either implemented, or rejected with a 400 that names it (fields.toml).
Unknown fields are ignored, and logged once.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from quire.engine.processor import Prompt, PromptFields
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.server.custom_tools import CustomTool, NamedCustomTool
from quire.server.fields import (
    MAX_INT,
    TABLES,
    CompressionRatio,
    Count,
    Effort,
    ExtraArguments,
    Function,
    FunctionName,
    LogitBias,
    Logprobs,
    MediaIO,
    NamedTool,
    Objects,
    Positive,
    Prompts,
    RepetitionDetection,
    ResponseFormat,
    StreamOptions,
    Strings,
    StructuredOutputs,
    TemplateArguments,
    TokenIds,
    Tool,
)
from quire.server.messages import Messages

MAX_N = 1024  # completions per prompt
MAX_SEQUENCES = 16_384  # completions of all prompts together

_EMBEDS = """Embeddings [tokens, hidden] in place of tokens: base64 of a file of torch.save or safetensors. These
come before the prompts of `prompt`. Only with --enable-prompt-embeds."""
UNSUPPORTED: dict[str, str] = TABLES["completions"]["refused"]
UNSUPPORTED_IN_CHAT = UNSUPPORTED | TABLES["chat"]["refused"]
WITHOUT_EFFECT = frozenset(TABLES["without_effect"].split())
_NEUTRAL: dict[str, list[Any]] = TABLES["completions"]["neutral"]
# Fields that beam search does not support, and their neutral values.
_NOT_IN_BEAMS: list[str] = TABLES["completions"]["beam_search"]["refused"].split()
_NEUTRAL_NUMBERS: dict[str, float] = TABLES["completions"]["beam_search"]["neutral"]
_GUIDED: dict[str, str] = TABLES["completions"]["structured_outputs"]


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="A served model's name; the first if left out.")

    def unsupported(self) -> tuple[str, str] | None:
        """Return (field, reason) of a field that would change the output but is not supported."""
        return None

    def unknown(self) -> list[str]:
        """Return the fields that are neither read nor known to have no effect."""
        return [name for name in self.model_extra or () if name not in WITHOUT_EFFECT]

    def hosted_tools(self) -> list[str]:
        """Return the types of tools that are left out because they do not run on the client."""
        return []


def _asks_for_nothing(name: str, value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or value in _NEUTRAL.get(name, [])


class PromptBody(Body):
    """The common fields of all requests with prompts."""

    add_special_tokens: bool | None = Field(None, description="Frame a text prompt as the tokenizer says.")
    priority: int | None = Field(
        None, ge=-MAX_INT, le=MAX_INT, description="The lowest comes first; not 0 needs --scheduling-policy priority."
    )
    cache_salt: str | None = Field(None, min_length=1, description="Share cached prefixes with the same salt only.")
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}$", description="Unless X-Request-Id says another.")


class Generation(PromptBody):
    """The common fields of completions and chats: sampling and response options. null is treated as omitted."""

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, body: Any) -> Any:
        """Move fields of earlier vLLM versions to structured_outputs, also in the body that errors refer to."""
        old = [name for name in _GUIDED if body.get(name)] if isinstance(body, dict) else []
        if old:
            given = body.get("structured_outputs")
            renamed = {_GUIDED[name]: body.pop(name) for name in old}
            body["structured_outputs"] = renamed | (given if isinstance(given, dict) else {})
        return body

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
    logprob_token_ids: TokenIds | None = Field(
        None, min_length=1, description="With logprobs: return those of these tokens, instead of the likeliest."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Shorten the prompt to so many tokens; -1: to what leaves room for output."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side from which truncate_prompt_tokens removes tokens: left (default) or right."
    )
    use_beam_search: bool | None = Field(None, description="Return the n likeliest texts that n beams find.")
    length_penalty: float | None = Field(
        None, description="With use_beam_search: a text scores its log-probability / tokens ** length_penalty."
    )
    repetition_detection: RepetitionDetection | None = Field(None, description="End output that repeats itself.")
    kv_compression: bool | CompressionRatio | None = Field(
        None, description="false keeps the whole KV cache of the prompt, {ratio} compresses it by this ratio."
    )
    stream_interval: Positive | None = Field(
        None, description="Tokens of an event of a stream; it counts if it is above the server's --stream-interval."
    )
    return_token_ids: bool | None = Field(None, description="Of the prompt and of the output.")
    return_spec_decode_metrics: bool | None = Field(None, description="What became of drafts, if there were any.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Logprobs name tokens 'token_id:42'.")
    response_format: ResponseFormat | None = Field(None, description="Make the answer JSON.")
    structured_outputs: StructuredOutputs | None = Field(None, description="What the text must look like.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Tokens after which the model's thinking is ended; -1: no limit."
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None, description="Where the prompt is computed, or who reads it: docs/disaggregation.md."
    )
    vllm_xargs: ExtraArguments | None = Field(None, description="extra_args for plugins that process logits.")
    user: str | None = Field(None, description="Ignored.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_generated(self) -> int:
        """Return how many completions are generated per prompt; n of them are returned."""
        return self.n or 1

    @property
    def max_tokens_field(self) -> str:
        """Return the name of the field that limits the output length."""
        return "max_tokens"

    def drop_prompt(self) -> None:
        """Drop the parts of the prompt that the response does not need."""

    @property
    def constraint_field(self) -> str | None:
        """Return the name of the field that constrains the text."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return None if self.response_format is None else "response_format"

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """Return the constraint on the text."""
        if self.structured_outputs is not None:
            return StructuredOutputsParams.create(self.structured_outputs)
        return None if self.response_format is None else self.response_format.constraint

    def given(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the request sets."""
        names = (name for name in SamplingParams.__struct_fields__ if name in type(self).model_fields)
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.model_dump()
        if isinstance(self.kv_compression, CompressionRatio):
            values["kv_compression"] = self.kv_compression.model_dump()
        if self.logprob_token_ids is not None:
            values["logprobs"] = None
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        extra_args: dict[str, Any] | None = self.vllm_xargs
        if self.kv_transfer_params:
            extra_args = {**(extra_args or {}), "kv_transfer_params": self.kv_transfer_params}
        return {**values, "structured_outputs": self.constraint, "output_kind": kind, "extra_args": extra_args}

    def refused(self, table: dict[str, str]) -> tuple[str, str] | None:
        for name, value in (self.model_extra or {}).items():
            if name in table and not _asks_for_nothing(name, value):
                return name, table[name]
        if self.structured_outputs is not None and self.response_format and self.response_format.constraint:
            return "response_format", "and structured_outputs exclude each other"
        if self.use_beam_search and (field := self._not_in_beams) is not None:
            return field, "cannot be used with use_beam_search"
        if self.stream_options is not None and not self.stream:
            return "stream_options", "is only allowed when stream is true"
        if self.stream and self.prompt_logprobs is not None and (self.n or 1) > 1:
            return "prompt_logprobs", "cannot be streamed for n > 1"
        return None

    @property
    def _not_in_beams(self) -> str | None:
        """Return a field whose value beam search does not support."""
        if self.constraint is not None:
            return self.constraint_field
        given = {name: getattr(self, name, None) for name in _NOT_IN_BEAMS}
        asking = (name for name, value in given.items() if not _asks_for_nothing(name, value))
        return next((name for name in asking if given[name] != _NEUTRAL_NUMBERS.get(name)), None)

    def unknown(self) -> list[str]:
        return [name for name in super().unknown() if name not in UNSUPPORTED_IN_CHAT]


class CompletionRequest(Generation):
    @model_validator(mode="before")
    @classmethod
    def _needs_no_text(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("prompt_embeds") and body.get("prompt") is None:
            body["prompt"] = ""
        return body

    prompt: Prompts
    prompt_embeds: str | Strings | None = Field(None, description=_EMBEDS)
    max_tokens: Count | None = Field(None, description="16 if left out; 0 needs echo.")
    echo: bool | None = Field(None, description="Begin with the prompt; its logprobs as well, if asked for.")
    logprobs: Logprobs | None = Field(None, description="Logprobs of so many of the likeliest tokens at each place.")
    suffix: str | None = Field(None, description="What stands behind the text, for models that fill gaps.")
    best_of: int | None = Field(
        None, ge=1, le=MAX_N, description="Generate so many completions and return the n likeliest; not in a stream."
    )

    @property
    def prompts(self) -> list[Prompt]:
        embeds = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
        found: list[Prompt] = [PromptFields(prompt_embeds=text) for text in embeds]
        if embeds and not self.prompt:
            return found
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [*found, *([self.prompt] if one else self.prompt)]

    def drop_prompt(self) -> None:
        self.prompt = ""
        self.prompt_embeds = None

    @property
    def num_generated(self) -> int:
        return max(super().num_generated, self.best_of or 1)

    def given(self) -> dict[str, Any]:
        values = super().given() | {"n": self.num_generated}
        if self.num_generated > (self.n or 1):
            values.setdefault("logprobs", 0)  # beam search needs the likelihood
        if self.echo and self.logprobs is not None:
            counts = (self.logprobs, self.prompt_logprobs or 0)
            values["prompt_logprobs"] = -1 if -1 in counts else max(counts)
        return values

    def unsupported(self) -> tuple[str, str] | None:
        if self.use_beam_search and self.echo and self.logprobs is not None:
            return "echo", "with logprobs cannot be used with use_beam_search"
        if self.best_of is not None and self.best_of < (self.n or 1):
            return "best_of", "should be at least n"
        if self.stream and self.num_generated > (self.n or 1):
            return "best_of", "above n cannot be streamed"
        for name in ("echo", "prompt_embeds", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                return name, "cannot be used with suffix"
        if self.logprob_token_ids is not None and (self.logprobs is None or self.max_tokens == 0):
            return "logprob_token_ids", "needs logprobs, and a max_tokens above 0"
        if self.prompt_embeds and self.echo:
            return "echo", "cannot be used with prompt_embeds, which have no text"
        if self.max_tokens == 0 and not self.echo:
            return "max_tokens", "should be at least 1, unless echo is true"
        if self.stream and self.echo and self.logprobs is not None and (self.n or 1) > 1:
            return "echo", "with logprobs cannot be streamed for n > 1"
        return self.refused(UNSUPPORTED)


class HostedTool(BaseModel):
    """A tool that would run on the server. It is not supported."""

    type: str


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", "function")
    return kind if kind in ("function", "custom") or not isinstance(kind, str) else "hosted"


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[CustomTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind_of_tool, "tool", "The type of a tool should be a string: function or custom"),
]


class Rendering(Body):
    """How the chat template renders a conversation."""

    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer; the default.")
    continue_final_message: bool | None = Field(None, description="End within the last message, to go on with it.")
    chat_template: str | None = Field(None, description="Only if the server trusts templates of requests.")
    chat_template_kwargs: TemplateArguments | None = None
    tools: list[AnyTool] | None = Field(
        None, description="Functions and custom tools that the model may call. Those of other types are left out."
    )
    documents: Objects | None = Field(None, description="Variable of the template.")
    reasoning_effort: Effort | None = Field(None, description="The same.")
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="Settings of the preprocessing of pictures.")
    media_io_kwargs: MediaIO | None = Field(None, description="Only {}: --media-io-kwargs sets it for all requests.")

    _trusts_template: bool = PrivateAttr(False)

    @property
    def trusts_template(self) -> bool:
        """Whether chat_template comes from the operator, and not from the request."""
        return self._trusts_template

    def trust_template(self) -> None:
        self._trusts_template = True

    @property
    def usable_tools(self) -> list[Tool | CustomTool]:
        return [tool for tool in self.tools or () if not isinstance(tool, HostedTool)]

    @property
    def tool_objects(self) -> list[dict[str, Any]]:
        """Return the tools as JSON objects; custom tools are represented by functions."""
        return [
            {"type": "function", **tool.model_dump(exclude_unset=True)}
            if isinstance(tool, Tool)
            else {"type": "function", "function": tool.function.model_dump(exclude_none=True)}
            for tool in self.usable_tools
        ]

    def hosted_tools(self) -> list[str]:
        return [tool.type for tool in self.tools or () if isinstance(tool, HostedTool)]


class ChatRequest(Generation, Rendering):
    messages: Messages
    echo: bool | None = Field(None, description="Begin with the last message, if the answer has its role.")
    max_tokens: Positive | None = Field(None, description="As max_completion_tokens, which counts if both are given.")
    max_completion_tokens: Positive | None = Field(None, description="Default: what the model's context has room for.")
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = Field(None, description="Only with logprobs.")
    return_prompt_text: bool | None = Field(None, description="The text that the chat template made of the messages.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | None = Field(
        None,
        description="Whether the model may call tools (auto, the default), must (required), or must call this one.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false allows one call in an answer.")
    include_reasoning: bool | None = Field(None, description="false leaves the model's thinking out.")
    functions: list[Function] | None = Field(None, min_length=1, description="The older form of tools.")
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        None, description="The older form of tool_choice, with functions."
    )
    _answers_functions: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _translate_functions(self) -> Self:
        if self.functions and not self.tools and self.tool_choice is None:
            self._answers_functions = True
            self.tools = [Tool(function=function) for function in self.functions]
            self.parallel_tool_calls = False
            choice = self.function_call
            self.tool_choice = NamedTool(function=choice) if isinstance(choice, FunctionName) else choice
        return self

    @property
    def answers_functions(self) -> bool:
        """Whether calls are returned in the older format: function_call instead of tool_calls."""
        return self._answers_functions

    @property
    def named_tool(self) -> str | None:
        """Return the name of the tool that the model must call."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tool_choice.custom.name if isinstance(self.tool_choice, NamedCustomTool) else None

    @property
    def forced_choice(self) -> str | dict[str, Any] | None:
        """Return the tool_choice if it forces calls: "required", or a choice that names a tool."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.model_dump()
        if (tool := self.forced_custom_tool) is not None:
            return {"type": "custom", "custom": {"name": tool.custom.name}}
        return "required" if self.tool_choice == "required" else None

    @property
    def forced_custom_tool(self) -> CustomTool | None:
        """Return the custom tool whose input is the whole output. This is the tool that the request names, or the only
        tool of a forced call if its input has a grammar, which a JSON list of calls could not follow."""
        tools = self.usable_tools
        if isinstance(self.tool_choice, NamedCustomTool):
            named = [tool for tool in tools if tool.function.name == self.named_tool]
            return next((tool for tool in named if isinstance(tool, CustomTool)), None)
        [only] = tools if self.tool_choice == "required" and len(tools) == 1 else [None]
        return only if isinstance(only, CustomTool) and only.grammar is not None else None

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.custom.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tool_objects

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def drop_prompt(self) -> None:
        self.messages = self.messages[-1:]  # with echo, the response begins with it
        self.tools = self.functions = self.documents = self.chat_template_kwargs = None

    def given(self) -> dict[str, Any]:
        values = super().given()
        values.pop("logprobs", None)
        if self.logprobs and self.logprob_token_ids is None:
            values["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        return values

    def unsupported(self) -> tuple[str, str] | None:
        if self.use_beam_search and self.forced_choice is not None:
            return "tool_choice", "cannot demand calls with use_beam_search"
        if self.top_logprobs and not self.logprobs:
            return "top_logprobs", "is only allowed when logprobs is true"
        if self.logprob_token_ids is not None and not self.logprobs:
            return "logprob_token_ids", "is only allowed when logprobs is true"
        if self.functions and not self.answers_functions:
            return "functions", "and tools exclude each other"
        if self.function_call is not None and not self.functions:
            return "function_call", "is only allowed with functions"
        if self.structured_outputs is not None and self.named_tool is not None:
            return "structured_outputs", "cannot be used with a tool_choice that names a tool"
        if (name := self.named_tool) is not None:
            field = "function_call" if self.answers_functions else "tool_choice"
            kind = Tool if isinstance(self.tool_choice, NamedTool) else CustomTool
            if all(tool.function.name != name for tool in self.usable_tools if isinstance(tool, kind)):
                return field, f"names {name!r}, which is none of the tools"
        if self.tool_choice == "required" and not self.usable_tools:
            return "tool_choice", "is 'required', but there are no tools"
        return self.refused(UNSUPPORTED_IN_CHAT)


class TokenizeRequest(Rendering):
    """A request to tokenize either a prompt or the messages of a chat."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    tokens: TokenIds


class AbortRequest(BaseModel):
    request_ids: Strings = Field(min_length=1, description="Ids of responses, or X-Request-Ids.")
