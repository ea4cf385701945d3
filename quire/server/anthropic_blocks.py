"""The messages and tools of Anthropic's API, and their translation to a chat request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Discriminator, Field, Tag

from quire.server.fields import TABLES, type_of

# Block types that only Anthropic's models can read: their encrypted thinking, and tools that ran at Anthropic.
_IGNORED = frozenset(TABLES["anthropic"]["ignored_blocks"].split())
_BILLING = "x-anthropic-billing-header"  # prefix of a text by Claude Code that differs in each request


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str = ""


class IgnoredBlock(BaseModel):
    """A block that only Anthropic's own models can use."""

    type: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Base64Source(BaseModel):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def where(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(BaseModel):
    type: Literal["url"]
    url: str

    @property
    def where(self) -> str:
        return self.url


class ImageBlock(BaseModel):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(BaseModel):
    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(BaseModel):
    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


class DocumentBlock(BaseModel):
    """A plain-text document. Files, such as PDF, are rejected."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(text for text in (self.title, self.context, self.source.text) if text)


class SearchResultBlock(BaseModel):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolReferenceBlock(BaseModel):
    """The name of a tool that a tool search found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class CompactionBlock(BaseModel):
    """The summary of earlier turns."""

    type: Literal["compaction"]
    content: str | None = None

    @property
    def text(self) -> str:
        return self.content or ""


_SHOWN_TYPES = ("text", "image", "document", "search_result", "tool_reference", "compaction")
Text = str | Annotated[list[TextBlock], Field(fail_fast=True)]
_SHOWN = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | CompactionBlock
Shown = (
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[CompactionBlock, Tag("compaction")]
    | Annotated[IgnoredBlock, Tag("ignored")]
)


def _block_type(value: Any) -> str | None:
    kind = type_of(value)
    return "ignored" if kind in _IGNORED else kind


def _wrong_type(*types: str) -> tuple[str, str]:
    """Return the error for a block of any other type."""
    return "block", f"Only blocks of these types are supported: {', '.join(types)}"


_ResultBlock = Annotated[Shown, Discriminator(_block_type, *_wrong_type(*_SHOWN_TYPES))]


class ToolResultBlock(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_ResultBlock], Field(fail_fast=True)] | None = None


Block = Annotated[
    Shown
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_block_type, *_wrong_type(*_SHOWN_TYPES, "thinking", "tool_use", "tool_result")),
]


class InputMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    @property
    def texts(self) -> list[str]:
        if isinstance(self.content, str):
            return [self.content]
        return [block.text for block in self.content if isinstance(block, TextBlock)]

    def translated(self, tool_names: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield OpenAI's messages. tool_names: the names of all earlier tool calls, by id; this message's calls are
        added."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        parts = []
        calls = []
        thoughts = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                name = tool_names.get(block.tool_use_id)
                content = text_of(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}
            elif isinstance(block, ToolUseBlock):
                tool_names[block.id] = block.name
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                thoughts += [block.thinking] if block.thinking else []
            elif isinstance(block, _SHOWN):
                parts.append(_part(block))
        if parts or calls or thoughts or not self.content:
            message = {"role": self.role, "content": parts, "tool_calls": calls or None}
            yield {**message, "reasoning": "\n".join(thoughts) or None}


def _part(block: _SHOWN) -> dict[str, Any]:
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": block.source.where}}
    return {"type": "text", "text": block.text}


def text_of(content: str | Sequence[BaseModel] | None) -> str | list[dict[str, Any]]:
    """Return the content of the OpenAI message."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(block) for block in content if isinstance(block, _SHOWN)]


def system_message(system: str | Sequence[TextBlock] | None) -> dict[str, Any] | None:
    """Return the OpenAI system message, or None without text.

    Text that Claude Code writes for Anthropic's accounting is left out. A model has no use for it, and it would prevent
    prefix-cache hits for everything after it.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [{"type": "text", "text": text} for text in texts if text and not text.startswith(_BILLING)]
    if not kept:
        return None
    return {"role": "system", "content": system if isinstance(system, str) else kept}


class Tool(BaseModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = Field(None, exclude=True)
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(serialization_alias="parameters")
    strict: bool | None = None


class HostedTool(BaseModel):
    """A tool that runs at Anthropic, or whose schema only Anthropic's models know. It is ignored."""

    type: str
    name: str | None = None


def _tool_type(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "client" if kind in (None, "custom") else "hosted"


AnyTool = Annotated[Annotated[Tool, Tag("client")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_tool_type)]
