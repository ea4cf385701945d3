"""Videos and sounds in the containers MP4 (with M4A and MOV), WebM (Matroska) and AVI, decoded by FFmpeg through PyAV.

The first bytes of the data select FFmpeg's demuxer. FFmpeg does not select it, since some demuxers open further files.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from quire.config.multimodal import MOST_FRAMES
from quire.multimodal.pictures import MediaError, check_frames
from quire.multimodal.preprocessing import Array
from quire.platform.extras import install_command

NAMES = "MP4, WebM, AVI, M4A"
MOST_PACKETS = 1_000_000  # frames of a video file: nine hours at 30 frames per second


def container_of(data: bytes) -> str | None:
    """Return FFmpeg's name of the container, or None if it is not supported here."""
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else None


def decode_video(data: bytes, most: int = MOST_FRAMES, fps: float = 0.0) -> tuple[list[Image.Image], float]:
    """Return at most `most` evenly spaced frames, upright and in RGB, and their frame rate. fps: the highest frame
    rate; 0 or less for no limit. Raises MediaError. For each chosen frame, only the frames from the preceding key frame
    on are decoded.
    """
    with _open(data, "video") as (container, stream):
        check_frames(1, stream.codec_context.width, stream.codec_context.height)
        times, keys = _times(container, stream)
        between = float((times[-1] - times[0]) * stream.time_base) / max(len(times) - 1, 1)  # seconds
        shown = between * len(times)
        if fps > 0 and shown:
            most = min(most, max(1, round(shown * fps)))
        chosen = [times[i] for i in np.linspace(0, len(times) - 1, min(len(times), most)).round().astype(int)]
        check_frames(len(chosen), stream.codec_context.width, stream.codec_context.height)
        frames = list[Image.Image]()
        decoded: Iterator[Any] = iter(())
        position = -1 << 63
        for time in chosen:
            key = keys[max(bisect_right(keys, time) - 1, 0)]
            if key > position:
                container.seek(key, stream=stream, backward=True)
                decoded = container.decode(stream)
            for frame in decoded:
                position = times[0] if frame.pts is None else frame.pts
                if position >= time:
                    check_frames(len(chosen), frame.width, frame.height)
                    frames.append(_upright(frame))
                    break
        if not frames:
            raise MediaError("the video is damaged")
    return frames, len(frames) / shown if shown else 1.0


def _times(container: Any, stream: Any) -> tuple[list[int], list[int]]:
    """Return the sorted presentation times of all frames and of the key frames, in units of the stream's time base."""
    times = list[int]()
    keys = list[int]()
    for packet in container.demux(stream):
        if packet.pts is not None and packet.size:
            times.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        if len(times) > MOST_PACKETS:
            raise MediaError(f"the video has more than {MOST_PACKETS} frames")
    if not keys:
        raise MediaError("the video has no frames")
    return sorted(set(times)), sorted(keys)


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


@contextmanager
def open_sound(data: bytes) -> Iterator[tuple[int, int, Iterator[Array]]]:
    """Return the sample rate, the number of channels, and blocks of mono samples: [samples], float32."""
    with _open(data, "audio") as (container, stream):
        rate = stream.codec_context.sample_rate
        channels = stream.codec_context.channels
        yield rate, channels, _mixed(container, stream)


def _mixed(container: Any, stream: Any) -> Iterator[Array]:
    for frame in container.decode(stream):
        values = frame.to_ndarray()  # [channels, samples], or [1, samples x channels] of a packed format
        if not frame.format.is_planar:
            values = values.reshape(-1, frame.layout.nb_channels).T
        if values.dtype.kind == "u":
            values = (values.astype(np.float32) - 128) / 128
        elif values.dtype.kind == "i":
            values = values.astype(np.float32) / -float(np.iinfo(values.dtype).min)
        yield values.astype(np.float32).mean(0)


@contextmanager
def _open(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """Open a container and its first stream of a kind. FFmpeg's errors, also within the `with` block, become
    MediaErrors."""
    what = {"video": "video", "audio": "sound"}[kind]
    try:
        import av
    except ImportError as error:
        raise MediaError(f"a {what} in such a file needs PyAV: {install_command('video')}") from error
    try:
        options = {"protocol_whitelist": "none"}
        with av.open(BytesIO(data), format=container_of(data), options=options, metadata_errors="ignore") as container:
            streams = container.streams.get({kind: 0}) if getattr(container.streams, kind) else []
            if not streams:
                raise MediaError(f"the file has no {what}")
            (stream,) = streams
            if stream.codec_context is None:
                raise MediaError(f"the {what} is in a codec that cannot be read")
            stream.codec_context.thread_count = 1  # a job has one processor, and a limit for all its threads
            yield container, stream
    except MediaError:
        raise
    except (av.FFmpegError, ArithmeticError, EOFError, ValueError) as error:
        raise MediaError(f"the {what} is damaged, or in a codec that cannot be read") from error
