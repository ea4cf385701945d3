"""Finds the media parts of messages, and fetches the media that they refer to."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from quire.config.multimodal import MOST_GIVEN_FRAMES, MultiModalConfig
from quire.messages.errors import error_text
from quire.multimodal.decoding import Encoded
from quire.multimodal.fetch import MOST_BYTES, fetch
from quire.multimodal.pictures import MediaError, picture

# Part type -> modality. The field with the source has the name of the type, or the one in _FIELDS.
PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
_FIELDS = {"input_image": "image_url"}  # the name in the Responses API


@dataclass(frozen=True)
class MediaPart:
    """A part of a message. where: its path in the request. source: a URL, or an object passed by a program."""

    where: str
    modality: str
    source: Any
    uuid: str | None = None


def split_content(
    messages: Sequence[Mapping[str, Any]], placeholders: Mapping[str, str]
) -> tuple[list[Mapping[str, Any]], list[MediaPart]]:
    """Return the messages with placeholders instead of their media, and the media. Raises MediaError."""
    rest = list[Mapping[str, Any]]()
    media = list[MediaPart]()
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            rest.append(message)
            continue
        parts = list[Any]()
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or kind not in PARTS:
                parts.append(part)
                continue
            found = _media_part(f"messages[{number}].content[{index}].{kind}", kind, part)
            if found.modality not in placeholders:
                taken = ", ".join([*placeholders, "text"])
                raise MediaError(f"{found.where}: this model takes no {found.modality}; it takes {taken}")
            media.append(found)
            parts.append({"type": found.modality, "placeholder": placeholders[found.modality]})
        rest.append({**message, "content": parts})
    return rest, media


def _media_part(where: str, kind: str, part: Mapping[str, Any]) -> MediaPart:
    value = part.get(_FIELDS.get(kind, kind))
    uuid = part.get("uuid")
    if isinstance(value, Mapping):
        uuid = value.get("uuid", uuid)
        data = value.get("data")
        value = value.get("url")
        if kind == "input_audio":
            value = f"data:;base64,{data}" if isinstance(data, str) else None
    if kind != "image_pil" and not isinstance(value, str):
        raise MediaError(f"{where}: it must have {'data' if kind == 'input_audio' else 'a URL'}")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= 256):
        raise MediaError(f"{where}: uuid must be a string of 1 to 256 characters")
    return MediaPart(where, PARTS[kind], value, uuid)


class Sources:
    """Fetches the media that requests name, as far as the options allow it."""

    def __init__(self, options: MultiModalConfig, sample_rate: int) -> None:
        """sample_rate: of the model's audio input."""
        self._sample_rate = sample_rate
        path = options.allowed_local_media_path
        self._folder = None if path is None else Path(path).resolve()
        self._domains = options.allowed_media_domains
        self._io = options.media_io

    def read(self, part: MediaPart) -> Any:
        """Return the Encoded item, or an image passed by a program. Raises MediaError that names the part."""
        try:
            if not isinstance(part.source, str):
                return picture(part.source)
            if part.modality == "video":
                return self._video(part.source)
            if part.modality == "audio":
                return Encoded("audio", (self._read(part.source),), self._sample_rate)
            return Encoded("image", (self._read(part.source),), io=self._io)
        except MediaError as error:
            raise MediaError(f"{part.where}: {error_text(error)}") from error

    def _video(self, url: str) -> Encoded:
        if url.startswith("data:video/jpeg;base64,"):  # single frames, as in vLLM
            if (count := url.count(",")) > MOST_GIVEN_FRAMES:
                raise MediaError(f"a video has 1 to {MOST_GIVEN_FRAMES} frames, got {count}")
            pieces = url.partition(",")[2].split(",")
            return Encoded("frames", tuple(_from_base64(piece) for piece in pieces))
        return Encoded("video", (self._read(url),), io=self._io)

    def _read(self, url: str) -> bytes:
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return _read_data(url)
        if scheme in ("http", "https"):
            return fetch(url, self._domains)
        if scheme == "file":
            return self._read_file(url)
        raise MediaError("the URL must begin with data:, http:// or https://")

    def _read_file(self, url: str) -> bytes:
        if self._folder is None:
            raise MediaError("file URLs are not allowed here (allowed_local_media_path)")
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        problem = "the file is not below allowed_local_media_path, or cannot be read"
        try:
            path = path.resolve()
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(self._folder) or not path.is_file():
                raise MediaError(problem)
            if path.stat().st_size > MOST_BYTES:
                raise MediaError(f"the file has more than {MOST_BYTES} bytes")
            return path.read_bytes()
        except (OSError, ValueError) as error:
            raise MediaError(problem) from error


def _read_data(url: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise MediaError("the data URL has no data")
    if len(data) > MOST_BYTES * 3 // 2:
        raise MediaError(f"the file has more than {MOST_BYTES} bytes")
    return _from_base64(data) if head.endswith(";base64") else unquote_to_bytes(data)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(unquote(text) if "%" in text else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("the data is not valid base64") from error
