"""The messages of a chat request. A role is any that the chat template knows."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from quire.text.chat_template import TEXT_PARTS
from quire_server.fields import Objects, fail

_PART_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {"properties": {"type": {"const": kind}, field: {"type": "string"}}, "required": [field]}
        for kind, field in TEXT_PARTS.items()
    ]
}


class ContentPart(BaseModel):
    """A part of a content that is text: in `refusal` or `thinking` if its type says so, else in `text`."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_PART_SCHEMA)

    type: str
    text: str | None = Field(None, validate_default=True)
    refusal: str | None = Field(None, validate_default=True)
    thinking: str | None = Field(None, validate_default=True)

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value not in TEXT_PARTS:
            raise fail("part", f"Only parts that hold text are supported: {', '.join(TEXT_PARTS)}")
        return value

    @field_validator("text", "refusal", "thinking")
    @classmethod
    def _is_there(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.field_name == TEXT_PARTS.get(info.data.get("type", "")):
            raise fail("missing", "Field required")
        return value


def text_of(part: str | ContentPart) -> str:
    return part if isinstance(part, str) else str(getattr(part, TEXT_PARTS[part.type]))


class Message(BaseModel):
    """Further fields (reasoning, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[str | ContentPart], Field(fail_fast=True)] | None = Field(
        None, description="A text, or parts of it; none is as an empty one."
    )
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Objects | None = None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
