"""Decodes the media of requests in worker processes: a file of a few bytes can occupy a processor for minutes.

A job receives the bytes of files, and returns samples or pixels as bytes, which are converted to Python objects here.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from PIL import Image

from quire.config.multimodal import MediaIO
from quire.multimodal.containers import container_of, decode_video
from quire.multimodal.families.base import Frames, Prepared
from quire.multimodal.pictures import MediaError, decode, decode_frames, decode_single_frames
from quire.multimodal.sounds import decode_sound
from quire.platform.untrusted.limits import MIB, LimitExceededError, Limits

if TYPE_CHECKING:
    from concurrent.futures import Future

with contextlib.suppress(ImportError):  # once for all jobs
    import soundfile  # noqa: F401
    import soxr  # noqa: F401

Kind = Literal["image", "video", "frames", "audio"]

# While an image is decoded, a pixel takes 4 bytes, and there are several copies. The limits in pictures.py and
# sounds.py are checked before.
_TOTAL = 60.0  # seconds, including the time spent on other requests
LIMITS: Mapping[Kind, Limits] = {
    "image": Limits(5.0, 1536 * MIB, _TOTAL, result_bytes=200 * MIB),
    "video": Limits(15.0, 2048 * MIB, _TOTAL, result_bytes=400 * MIB),
    "frames": Limits(15.0, 2048 * MIB, _TOTAL, result_bytes=400 * MIB),
    "audio": Limits(30.0, 1024 * MIB, _TOTAL, result_bytes=400 * MIB),
}


@dataclass(frozen=True)
class Encoded:
    """An item that is not decoded yet. kind: "frames" are a video's frames, one file each. sample_rate: of audio. io:
    how images and videos are decoded."""

    kind: Kind
    files: tuple[bytes, ...]
    sample_rate: int = 0
    io: MediaIO = MediaIO()

    def submit(self) -> "Future[Any]":
        """Decode it in a worker process. Pass the result to `decoded`. Raises BusyError; see UntrustedPool.submit."""
        from quire.platform.untrusted.pool import shared_pool

        name = f"{__name__}:decode_plain"
        settings = self.sample_rate, astuple(self.io)
        return shared_pool().submit(name, self.kind, self.files, *settings, limits=LIMITS[self.kind])

    def decode(self) -> Any:
        """Return an image, the Frames of a video, or samples, decoded in this process. Raises MediaError."""
        return _decode(self.kind, self.files, self.sample_rate, self.io)

    def key(self, kwargs: Mapping[str, Any] | None) -> str:
        """Return a hash of everything that the preprocessed item depends on. kwargs: preprocessing settings."""
        digest = sha256(msgspec.json.encode([self.kind, self.sample_rate, [len(file) for file in self.files], kwargs]))
        for file in self.files:
            digest.update(file)
        return digest.hexdigest()


def refusal(error: ValueError) -> MediaError:
    """Return the client's error for a job's failure."""
    return MediaError(f"it cannot be decoded: {error}" if isinstance(error, LimitExceededError) else str(error))


def decoded(kind: Kind, plain: Any) -> Any:
    """Return the item that a job has decoded."""
    if kind == "image":
        return _image(plain)
    if kind == "audio":
        return np.frombuffer(plain, np.float32)
    frames, fps = plain
    return Frames([_image(frame) for frame in frames], fps)


def _image(plain: Any) -> Image.Image:
    width, height, pixels = plain
    return Image.frombytes("RGB", (width, height), pixels)


def _decode(kind: Kind, files: "tuple[bytes, ...] | list[bytes]", sample_rate: int, io: MediaIO) -> Any:
    if kind == "image":
        return decode(files[0], io.background)
    if kind == "audio":
        return decode_sound(files[0], sample_rate)
    if kind == "frames":
        return Frames(decode_single_frames(files))
    read = decode_frames if container_of(files[0]) is None else decode_video
    return Frames(*read(files[0], io.num_frames, io.fps))


class ItemCache:
    """A cache of the most recently used preprocessed items, of at most `most` bytes. Its methods may be called on any
    thread."""

    def __init__(self, most: int) -> None:
        self._most, self._size, self._lock = most, 0, Lock()
        self._items: OrderedDict[str, Prepared] = OrderedDict()

    def get(self, key: str) -> Prepared | None:
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def put(self, key: str, item: Prepared) -> None:
        with self._lock:
            if key not in self._items:
                self._items[key] = item
                self._size += _size(item)
            while self._size > self._most:
                _, dropped = self._items.popitem(last=False)
                self._size -= _size(dropped)


def _size(item: Prepared) -> int:
    return sum(tensor.nbytes for tensor in item.tensors.values()) + len(item.text) + 1000


# ---- in the worker processes


def decode_plain(kind: Kind, files: list[bytes], sample_rate: int, io: tuple[Any, ...]) -> Any:
    """Return plain data for `decoded`. io: the fields of MediaIO. Raises MediaError."""
    value = _decode(kind, files, sample_rate, MediaIO(*io))
    if isinstance(value, Frames):
        return [_pixels(image) for image in value.images], value.fps
    return _pixels(value) if isinstance(value, Image.Image) else value.astype(np.float32, copy=False).tobytes()


def _pixels(image: Image.Image) -> tuple[int, int, bytes]:
    return image.width, image.height, image.tobytes()
