"""Small files that would take a decoder long, or much memory."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode

from PIL import Image


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes | None = None) -> bytes:
    """A picture of one color. data: its compressed pixels."""
    if data is None:
        packer = zlib.compressobj(9)
        row = bytes(1 + 3 * width)
        data = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def jpeg_of_scans(size: int, scans: int) -> bytes:
    """A progressive picture of size x size pixels, whose last scan comes again and again: each visits all blocks."""
    file = io.BytesIO()
    Image.new("RGB", (size, size), (90, 20, 200)).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def gif(frames: int, size: int = 2) -> bytes:
    """An animation."""
    data = saved(Image.new("P", (size, size)), "GIF")
    start = data.index(b",", 13 + 3 * 2 ** ((data[10] & 7) + 1))
    return data[:start] + data[start:-1] * frames + b";"


def wav(seconds: float, rate: int = 16_000, declared: int | None = None) -> bytes:
    """Silence. declared: bytes that the header says."""
    size = int(seconds * rate) * 2
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + size,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        rate,
        2 * rate,
        2,
        16,
        b"data",
        size if declared is None else declared,
    )
    return head + bytes(size)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"
