"""Types of fields that several requests share.

Values are read as pydantic's lax mode reads them, which is vLLM's: "5" is an integer, "0.5" a number, "true" a boolean.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from quire.messages.errors import error_text
from quire.messages.structured_outputs import StructuredOutputsParams
from quire.text.chat_template import RESERVED

MAX_INT = 2**31 - 1
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
TokenIds = Annotated[list[Count], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def fail(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, message)


def _check_number(value: Any) -> Any:
    """Reject strings, like vLLM, which compares these numbers before it converts strings to numbers."""
    if isinstance(value, str):
        raise fail("number", "Input should be an integer, not a string")
    return value


Logprobs = Annotated[int, BeforeValidator(_check_number), Field(ge=-1, le=MAX_INT)]
# As in vLLM: OpenAI's effort levels, and DeepSeek's max.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_NAME = 256


def check_name(value: str) -> str:
    """Validate a name that clients choose, and that logs, metrics and lists show. Raises PydanticCustomError."""
    if not 0 < len(value) <= MAX_NAME:
        raise fail("name", f"A name should have 1 to {MAX_NAME} characters")
    if not value.isprintable():
        raise fail("name", "A name should have printable characters only: no line breaks, no marks of direction")
    return value


Name = Annotated[str, AfterValidator(check_name)]


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="End with a chunk that has the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Say the usage so far in every chunk, too.")


class RepetitionDetection(BaseModel):
    """Ends a request whose output repeats itself."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Count = Field(0, description="Tokens of the longest pattern to look for; 0 looks for none.")
    min_pattern_size: Count = Field(0, description="Tokens of the shortest pattern; 0 is as 1.")
    min_count: Count = Field(0, description="Times in a row that the pattern stands at the end of the output.")


class CompressionRatio(BaseModel):
    """The factor by which the KV cache of the prompt shrinks."""

    model_config = ConfigDict(extra="forbid")

    ratio: float = Field(ge=1, le=1024, description="2 keeps half of it.")


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str | None = Field(None, description="Without effect, as description and strict: a schema always holds.")
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's field for JSON output, with vLLM's type structural_tag."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """Return the constraint on the text. Raises ValueError or TypeError."""
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_schema" and self.json_schema is not None:
            return StructuredOutputsParams.create({"json": self.json_schema.json_schema})
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=json.dumps(self.model_dump(exclude_unset=True)))
        return None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise fail("missing", "json_schema: Field required")
        _check_constraint(lambda: self.constraint)
        return self


def _check_constraint(create: Callable[[], object]) -> None:
    try:
        create()
    except (ValueError, TypeError) as error:
        # The error response already names the field.
        raise fail("constraint", error_text(error).removeprefix("structured_outputs: ")) from error


def _check_structured(value: dict[str, Any]) -> dict[str, Any]:
    _check_constraint(lambda: StructuredOutputsParams.create(value))
    return value


StructuredOutputs = Annotated[dict[str, Any], AfterValidator(_check_structured)]


def type_of(value: Any, default: str | None = None) -> str | None:
    """Return the type of an item or a block, which selects its model; None if it is invalid. default: used if it is
    omitted."""
    kind = value.get("type") or default if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


class Function(BaseModel):
    """The function of a tool. Further fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object: the arguments.")


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionName


def _check_bias(value: Any) -> Any:
    """Check by hand, since pydantic would list every error, however many there are."""
    keys = list(value) if isinstance(value, dict) else []
    wrong = [key for key in keys if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    try:
        biases = {int(token_id): float(bias) for token_id, bias in value.items() if not wrong}
        if not wrong and all(-100 <= bias <= 100 for bias in biases.values()):
            return biases
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    named = f", not {', '.join(repr(key[:64]) for key in wrong[:5])}" if wrong else ""
    raise fail("bias", f"Input should have token ids as keys, such as '50256'{named}, and numbers from -100 to 100")


LogitBias = Annotated[Any, AfterValidator(_check_bias), WithJsonSchema(TABLES["logit_bias"]["schema"])]


def _check_sendable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise fail("range", "Integers should fit in 64 bits") from error
    return value


ExtraArguments = Annotated[dict[str, Any], AfterValidator(_check_sendable)]


def _check_prompt(value: Any) -> Any:
    """Check by hand, for the same reason as with logit_bias."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value) or all(type(item) is str for item in value):
            return value
        if all(type(item) is list for item in value) and all(type(token) is int for item in value for token in item):
            return value
    raise fail("prompt", "Input should be a string, token ids, a list of strings or a list of lists of token ids")


Prompts = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(TABLES["prompt"]["schema"])]


def _check_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := [name for name in value if name in RESERVED]:
        raise fail("reserved", f"'{reserved[0]}' cannot be set here")
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]


def _check_media_io(value: dict[str, Any]) -> dict[str, Any]:
    if value:
        raise fail("media_io", "Only the server's option --media-io-kwargs says how media are decoded")
    return value


MediaIO = Annotated[dict[str, Any], AfterValidator(_check_media_io)]
