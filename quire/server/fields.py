"""Types of fields that several requests share.

Values are read as pydantic's lax mode reads them, which is vLLM's: "5" is an integer, "0.5" a number, "true" a boolean.
"""

from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_INT = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
TokenIds = Annotated[list[Count], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Logprobs = Annotated[int, Field(ge=-1, le=MAX_INT)]


def fail(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, message)


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="End with a chunk that has the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Say the usage so far in every chunk, too.")


class RepetitionDetection(BaseModel):
    """Ends a request whose output repeats itself."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Count = Field(0, description="Tokens of the longest pattern to look for; 0 looks for none.")
    min_pattern_size: Count = Field(0, description="Tokens of the shortest pattern; 0 is as 1.")
    min_count: Count = Field(0, description="Times in a row that the pattern stands at the end of the output.")


def _check_bias(value: Any) -> Any:
    """By hand, as pydantic would list all that is wrong, however many."""
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
        raise fail("range", "Integers should fit in 64 bits") from error
    return value


ExtraArguments = Annotated[dict[str, Any], AfterValidator(_check_sendable)]


def _check_prompt(value: Any) -> Any:
    """By hand for the same reason as logit_bias."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value) or all(type(item) is str for item in value):
            return value
        if all(type(item) is list for item in value) and all(type(token) is int for item in value for token in item):
            return value
    raise fail("prompt", "Input should be a string, token ids, a list of strings or a list of lists of token ids")


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
Prompts = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]

# Arguments of the chat template's renderer that a request sets by other fields, or may not set.
_RESERVED_KWARGS = """messages template chat_template tools documents add_generation_prompt continue_final_message
    tokenize""".split()


def _check_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    if reserved := [name for name in value if name in _RESERVED_KWARGS]:
        raise fail("reserved", f"'{reserved[0]}' cannot be set here")
    return value


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_check_kwargs)]
