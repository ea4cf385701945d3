"""Videos and sounds in MP4, WebM, AVI and M4A files, which PyAV has encoded here."""

from __future__ import annotations

import contextlib
import io

import av
import numpy as np
import pytest
from PIL import Image

from quire.multimodal import containers, pictures
from quire.multimodal.decoding import Encoded, decoded
from quire.multimodal.pictures import MediaError
from quire.multimodal.sounds import decode_sound

RATE = 10  # frames a second
VIDEOS = [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mov", "mpeg4")]
SOUNDS = [("mp4", "aac"), ("ipod", "aac"), ("webm", "libopus"), ("matroska", "pcm_s16le"), ("mov", "pcm_u8")]


def brightness(index: int) -> int:
    return 20 + 4 * index


def video(container: str, codec: str, count: int = 50, size: tuple[int, int] = (64, 48), gop: int = 12) -> bytes:
    """Frames that are evenly gray, and brighter from one to the next."""
    data = io.BytesIO()
    with av.open(data, "w", format=container) as file:
        stream = file.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.gop_size, stream.bit_rate = gop, 4_000_000
        for i in range(count):
            frame = av.VideoFrame.from_image(Image.new("RGB", size, (brightness(i),) * 3))
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return data.getvalue()


def tone(container: str, codec: str, rate: int = 48_000, seconds: float = 2.0, layout: str = "mono") -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        samples = np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate).astype(np.float32) / 2
        channels = 2 if layout == "stereo" else 1
        for start in range(0, len(samples), 1024):
            block = np.repeat(samples[None, start : start + 1024], channels, 0)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(block), format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return data.getvalue()


def middle(image: Image.Image) -> float:
    return float(np.asarray(image.convert("L"), np.float32)[8:-8, 8:-8].mean())


@pytest.mark.parametrize(("container", "codec"), VIDEOS)
@pytest.mark.parametrize("most", [32, 4])
def test_evenly_spaced_frames_are_taken(container, codec, most):
    frames, fps = containers.decode_video(video(container, codec), most)
    chosen = np.linspace(0, 49, most).round().astype(int)
    assert [round(middle(frame)) for frame in frames] == pytest.approx([brightness(i) for i in chosen], abs=3)
    assert {frame.size for frame in frames} == {(64, 48)}
    assert fps == pytest.approx(most / 5, rel=0.02)


def test_a_short_video_gives_all_of_its_frames():
    frames, fps = containers.decode_video(video("mp4", "mpeg4", count=3))
    assert [round(middle(frame)) for frame in frames] == pytest.approx([brightness(i) for i in range(3)], abs=3)
    assert fps == pytest.approx(RATE, rel=0.02)
    [frame], fps = containers.decode_video(video("mp4", "mpeg4", count=1))
    assert (frame.size, fps) == ((64, 48), 1.0)


@pytest.mark.parametrize(("container", "codec"), SOUNDS)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_a_sound_is_mixed_and_resampled(container, codec, layout):
    samples = decode_sound(tone(container, codec, layout=layout), 16_000)
    assert len(samples) == pytest.approx(32_000, abs=2_000)
    spectrum = np.abs(np.fft.rfft(samples[4_000:20_000]))
    assert spectrum.argmax() == 440  # hertz, since the window takes a second
    assert np.sqrt((samples[4_000:20_000] ** 2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_worker_processes_decode_them():
    frames = decoded("video", Encoded("video", (video("mp4", "libx264"),)).submit().result())
    assert len(frames.images) == 32
    sound = decoded("audio", Encoded("audio", (tone("ipod", "aac"),), 16_000).submit().result())
    assert np.array_equal(sound, decode_sound(tone("ipod", "aac"), 16_000))


def test_a_video_is_a_sound_if_it_has_one():
    with pytest.raises(MediaError, match="the file has no sound"):
        decode_sound(video("mp4", "mpeg4"), 16_000)
    with pytest.raises(MediaError, match="the file has no video"):
        containers.decode_video(tone("mp4", "aac"))


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_damaged_files_are_refused(kind):
    data = video("mp4", "mpeg4") if kind == "video" else tone("mp4", "aac")
    generator = np.random.default_rng(7)
    for cut in range(8, len(data), max(len(data) // 40, 1)):
        noise = np.frombuffer(data, np.uint8).copy()
        noise[generator.integers(12, len(noise), 30)] = generator.integers(0, 256, 30)
        for wrong in (data[:cut], noise.tobytes()):
            with contextlib.suppress(MediaError):  # some noise is in pixels
                Encoded(kind, (wrong,), 16_000).decode()


def test_too_many_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_VIDEO_PIXELS", 32 * 64 * 48 - 1)
    data = video("mp4", "mpeg4")
    with pytest.raises(MediaError, match="the video has 32 frames of 64 x 48 pixels; at most 98303 pixels are allowed"):
        containers.decode_video(data)
    assert len(containers.decode_video(data, 31)[0]) == 31


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>',
    ],
)
def test_formats_that_open_other_files_are_not_read(data):
    assert containers.container_of(data) is None
    with pytest.raises(MediaError, match="no image in a known format"):
        Encoded("video", (data,)).decode()
    with pytest.raises(MediaError, match="no sound in a known format"):
        decode_sound(data, 16_000)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    data = video("mp4", "mpeg4")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"needs PyAV: pip install .*\[video\]"):
        containers.decode_video(data)
