"""The messages of a chat request. The chat template decides which roles are valid."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from quire.server.custom_tools import as_functions
from quire.server.fields import Objects, fail
from quire.text.chat_template import TEXT_PARTS

# The types of content parts with pictures or other media, and the field with their source.
MEDIA_PARTS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
}
_PART_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {"properties": {"type": {"const": kind}, field: {"type": "string"}}, "required": [field]}
        for kind, field in TEXT_PARTS.items()
    ]
    + [{"properties": {"type": {"const": kind}}, "required": [field]} for kind, field in MEDIA_PARTS.items()]
}


class MediaUrl(BaseModel):
    model_config = ConfigDict(extra="allow")  # detail

    url: str = Field(description="data:, http:// or https://; file:// below --allowed-local-media-path.")


class InputAudio(BaseModel):
    model_config = ConfigDict(extra="allow")

    data: str
    format: str | None = None


class ContentPart(BaseModel):
    """A content part: text, which is in `refusal` or `thinking` for those types and otherwise in `text`; or a picture
    or another media item, for models with such inputs."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_PART_SCHEMA)

    type: str
    text: str | None = Field(None, validate_default=True)
    refusal: str | None = Field(None, validate_default=True)
    thinking: str | None = Field(None, validate_default=True)
    image_url: MediaUrl | str | None = Field(None, validate_default=True)
    video_url: MediaUrl | str | None = Field(None, validate_default=True)
    audio_url: MediaUrl | str | None = Field(None, validate_default=True)
    input_audio: InputAudio | None = Field(None, validate_default=True)
    uuid: str | None = Field(None, description="A name of the item; equal names share what was computed.")

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in TEXT_PARTS and value not in MEDIA_PARTS:
            raise fail("part", f"Only these parts are supported: {', '.join([*TEXT_PARTS, *MEDIA_PARTS])}")
        return value

    @field_validator("text", "refusal", "thinking", *set(MEDIA_PARTS.values()))
    @classmethod
    def _is_there(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("type", "")
        if value is None and info.field_name == (TEXT_PARTS | MEDIA_PARTS).get(kind):
            raise fail("missing", "Field required")
        return value


def text_of(part: str | ContentPart) -> str:
    return part if isinstance(part, str) else str(getattr(part, TEXT_PARTS.get(part.type, "text")) or "")


class Message(BaseModel):
    """Further fields (reasoning, ...) are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[str | ContentPart], Field(fail_fast=True)] | None = Field(
        None, description="A text, or parts of it; none is as an empty one."
    )
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[Objects, AfterValidator(as_functions)] | None = None


def _with_tool_calls(messages: list[Message]) -> list[Message]:
    """Convert function_call and the role function, OpenAI's older forms, to tool calls and tool results."""
    call_id = None
    for index, message in enumerate(messages):
        call = (message.model_extra or {}).pop("function_call", None)
        if call is not None and not message.tool_calls:
            if not isinstance(call, dict) or not all(isinstance(call.get(key), str) for key in ("name", "arguments")):
                raise fail("call", "function_call should be an object with the keys name and arguments")
            call_id = f"call{index:05}"  # nine letters and digits, as Mistral's chat template demands
            message.tool_calls = [{"id": call_id, "type": "function", "function": call}]
        elif message.role == "function":
            message.role = "tool"
            message.tool_call_id = message.tool_call_id or call_id
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), AfterValidator(_with_tool_calls)]


def json_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in messages]


def has_media(messages: Sequence[Message]) -> bool:
    return any(
        isinstance(part, ContentPart) and part.type in MEDIA_PARTS
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
    )
