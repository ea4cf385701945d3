"""Options about media: how files are decoded, how many a prompt may have, and what is kept of them."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from quire.config.engine import ConfigError, EngineConfig
from quire.config.multimodal import MediaIO, MultiModalConfig
from quire.multimodal.decoding import Encoded
from quire.multimodal.pictures import MediaError
from support.engines import make_llm
from support.seeing import picture


def saved(images: list[Image.Image], format: str, **options) -> bytes:
    file = io.BytesIO()
    images[0].save(file, format, save_all=len(images) > 1, append_images=images[1:], **options)
    return file.getvalue()


MOVING = saved([picture(i, 20, 20) for i in range(10)], "GIF", duration=100)  # a second
CLEAR = saved([Image.new("RGBA", (8, 8), (0, 0, 0, 0))], "PNG")


@pytest.mark.parametrize(
    ("given", "frames", "fps"),
    [
        ({}, 10, 10.0),
        ({"num_frames": 5}, 5, 5.0),
        ({"fps": 2}, 2, 2.0),
        ({"fps": 2, "num_frames": -1}, 2, 2.0),
        ({"fps": -1, "num_frames": 4}, 4, 4.0),
        ({"fps": 0.1}, 1, 1.0),
    ],
)
def test_frames_of_a_video_are_taken_as_the_options_say(given, frames, fps):
    options = MultiModalConfig(media_io_kwargs={"video": given}).media_io
    encoded = Encoded("video", (MOVING,), io=options)
    here, apart = encoded.decode(), encoded.submit().result()
    assert (len(here.images), here.fps) == (frames, fps)
    assert (len(apart[0]), apart[1]) == (frames, fps)


def test_what_is_transparent_gets_the_colour_of_the_options():
    given = {"image": {"rgba_background_color": [10, 20, 30], "image_mode": "RGB"}}
    encoded = Encoded("image", (CLEAR,), io=MultiModalConfig(media_io_kwargs=given).media_io)
    assert encoded.decode().getpixel((0, 0)) == (10, 20, 30)
    assert Encoded("image", (CLEAR,)).decode().getpixel((0, 0)) == (255, 255, 255)
    assert MultiModalConfig().media_io == MediaIO()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"video": {"num_frames": 0}}, r"video.num_frames must be a number from 1 to 256, or -1 for all, got 0"),
        ({"video": {"fps": 0}}, "video.fps must be a number of frames a second"),
        ({"video": {"backend": "opencv"}}, "video has no field 'backend'; it has num_frames, fps"),
        ({"image": {"rgba_background_color": [1, 2]}}, "image.rgba_background_color must be three numbers"),
        ({"image": {"image_mode": "L"}}, 'image.image_mode must be "RGB"'),
        ({"audio": {"x": 1}}, "audio has no field 'x'; it has no field"),
        ({"picture": {}}, "must have objects for image, video, audio"),
        ({"image": 3}, "must have objects for image, video, audio"),
    ],
)
def test_wrong_settings_of_decoders_are_named(given, message):
    with pytest.raises(ConfigError, match=f"^media_io_kwargs.*{message}"):
        EngineConfig.create(media_io_kwargs=given)


def test_limits_are_numbers_or_objects_with_a_count():
    options = MultiModalConfig(limit_mm_per_prompt={"image": 2, "video": {"count": 1, "num_frames": 8}, "audio": {}})
    assert [options.most_items(kind, 999) for kind in ("image", "video", "audio")] == [2, 1, 999]
    assert MultiModalConfig(language_model_only=True).most_items("image", 999) == 0
    for wrong in ({"image": -1}, {"image": True}, {"video": {"count": "1"}}, {"video": {"frames": 1}}, {"text": 1}):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt must give numbers for image, video, audio"):
            MultiModalConfig(limit_mm_per_prompt=wrong)
    with pytest.raises(ConfigError, match="mm_processor_cache_gb is a number of GiB, got -1"):
        MultiModalConfig(mm_processor_cache_gb=-1)


@pytest.fixture(scope="module")
def llm():
    return make_llm("quire-demo/vision", max_num_seqs=4, limit_mm_per_prompt={"image": {"count": 1}, "video": 0})


def test_an_engine_keeps_to_the_count(llm):
    content = [{"type": "image_pil", "image_pil": picture(1)}, {"type": "text", "text": "What do you see?"}]
    assert llm.chat([{"role": "user", "content": content}], use_tqdm=False)
    with pytest.raises(MediaError, match="2 items of modality image; at most 1 are allowed"):
        llm.chat([{"role": "user", "content": [content[0], *content]}], use_tqdm=False)


@pytest.mark.parametrize(("gigabytes", "kept"), [(0.125, True), (0, False), (1e-7, False)])
def test_preprocessed_items_are_kept_up_to_a_size(llm, gigabytes, kept):
    from quire.multimodal.decoding import ItemCache

    prepared = llm.processor.media.family(None).image(picture(2))
    cache = ItemCache(int(gigabytes * 2**30))
    cache.put("a", prepared)
    assert (cache.get("a") is not None) == kept


def test_a_request_cannot_change_how_files_are_decoded(llm):
    from pydantic import ValidationError

    from quire.server.protocol import ChatRequest, TokenizeRequest

    messages = [{"role": "user", "content": "a"}]
    for kind in (ChatRequest, TokenizeRequest):
        assert kind(messages=messages, media_io_kwargs={}).media_io_kwargs == {}
        with pytest.raises(ValidationError, match="Only the server's option --media-io-kwargs"):
            kind(messages=messages, media_io_kwargs={"video": {"num_frames": 4}})
