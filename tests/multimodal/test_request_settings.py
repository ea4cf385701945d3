"""What requests may change of the preprocessing of pictures, and how much work a request with pictures makes."""

from __future__ import annotations

import base64
import io
import struct

import pytest
from PIL import Image

from quire.checkpoints.hub import local_model
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.frontend import Frontend
from quire.multimodal.processor import load_family
from quire.multimodal.spec import MediaSpec
from support.seeing import picture
from support.server import Host


@pytest.fixture(scope="module")
def host():
    started = Host(model="quire-demo/vision", max_model_len=256)
    yield started
    started.close()


@pytest.fixture(scope="module")
def service(host):
    return host.serve()


def data_of(image: Image.Image, format: str, **options) -> str:
    file = io.BytesIO()
    image.save(file, format, **options)
    return base64.b64encode(file.getvalue()).decode()


def part(image: Image.Image, format: str = "PNG", **options) -> dict:
    return {"type": "image_url", "image_url": "data:;base64," + data_of(image, format, **options)}


def ask(service, *parts, **fields):
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What do you see?"}]}]}
    return service.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 8, **fields})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"patch_size": 7}, "cannot change 'patch_size'"),
        ({"merge_size": 3}, "cannot change 'merge_size'"),
        ({"do_resize": False}, "cannot change 'do_resize'"),
        ({"image_std": [0, 0, 0]}, "cannot change 'image_std'"),
        ({"size": 3}, "cannot change 'size'"),
        ({"size": {}}, "cannot change 'size'"),
        ({"size": {"width": 3}}, "cannot change 'size.width'"),
        ({"size": {"longest_edge": "x"}}, "size.longest_edge must be a number from 1"),
        ({"max_pixels": 0}, "max_pixels must be a number from 1"),
        ({"max_pixels": 10**9}, "max_pixels must be a number from 1"),
        ({"max_pixels": True}, "max_pixels must be a number from 1"),
        ({"max_pixels": {}}, "max_pixels must be a number from 1"),
        ({"min_pixels": {"a": 1}}, "cannot change 'min_pixels.a'"),
    ],
)
def test_settings_that_a_request_must_not_change_are_refused_by_name(service, settings, reason):
    answer = ask(service, part(picture(1)), mm_processor_kwargs=settings)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "mm_processor_kwargs"
    assert reason in answer.error["message"]


def test_a_request_may_make_its_pictures_smaller(service):
    image = part(Image.new("RGB", (256, 256)))
    counts = [
        ask(service, image, mm_processor_kwargs=settings).json["usage"]["prompt_tokens"]
        for settings in ({}, {"max_pixels": 2048}, {"size": {"longest_edge": 2048}}, {"max_pixels": 1})
    ]
    assert counts[0] > counts[1] == counts[2] > counts[3]


@pytest.mark.parametrize(
    ("family", "config", "settings", "usable", "wrong"),
    [
        (
            "internvl",
            {"image_size": 28},
            {"max_patches": 4},
            {"max_patches": 2, "crop_to_patches": False},
            "size.height",
        ),
        ("idefics3", {"image_size": 32, "patch_size": 8}, {}, {"do_image_splitting": False}, "max_image_size"),
        ("pixtral", {"image_size": 64}, {}, {"size.longest_edge": 32}, "patch_size"),
        ("llava", {"image_size": 28}, {}, {}, "do_center_crop"),
        ("gemma3", {"image_size": 28}, {}, {}, "do_pan_and_scan"),
    ],
)
def test_what_is_adjustable_makes_pictures_no_larger(family, config, settings, usable, wrong):
    spec = MediaSpec(family, {"vision_config": config})
    made = load_family(spec, settings, str)
    assert wrong not in made.adjustable
    assert usable.keys() <= made.adjustable.keys()
    nested = {name.partition(".")[0]: {name.partition(".")[2]: v} if "." in name else v for name, v in usable.items()}
    image = Image.new("RGB", (100, 60))
    assert load_family(spec, {**settings, **nested}, str).image(image).num_embeds <= made.image(image).num_embeds


def test_a_picture_that_the_model_cannot_see_is_named(service):
    answer = ask(service, part(picture(1)), part(Image.new("RGB", (1, 2000))))
    assert answer.status == 400, answer.body
    assert answer.error["param"] == "messages[0].content[1].image_url"
    assert "longer edge" in answer.error["message"]


@pytest.mark.slow
def test_pictures_beyond_the_context_are_not_decoded(service):
    """A picture of 2.5 KB takes 192 MB when it is decoded. So many of them must not be decoded at once, or in vain."""
    large, small = part(Image.new("RGB", (8000, 7999)), "WEBP", lossless=True), part(Image.new("RGB", (256, 256)))
    answer = ask(service, *[small] * 100, *[large] * 800)
    assert answer.status == 400, answer.body
    assert answer.error["code"] == "context_length_exceeded"
    assert int(answer.error["param"].split("[")[2].split("]")[0]) < 100


def test_wrong_settings_of_the_server_are_an_error_at_the_start():
    folder = local_model("quire-demo/vision")
    for settings in ({"size": 3}, {"max_pixels": "x"}, {"resample": 99}, {"image_mean": "x"}):
        with pytest.raises(ConfigError, match="mm_processor_kwargs"):
            Frontend(EngineConfig.create(mm_processor_kwargs=settings), folder, in_process=True)


def test_a_video_has_a_bounded_number_of_pixels(service):
    """Each of these files has a few KB, and its frames would take GBs."""
    single = data_of(Image.new("RGB", (1000, 1000)), "WEBP", lossless=True)
    first, *others = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue") * 8)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others)
    moving = file.getvalue()
    moving = moving[:6] + struct.pack("<HH", 3000, 3000) + moving[10:]  # each frame is in a corner of a large picture
    for data, reason in (
        ("video/jpeg;base64," + ",".join([single] * 200), "200 frames of 1000 x 1000 pixels"),
        ("video/jpeg;base64," + ",".join([data_of(picture(1), "PNG")] * 300), "1 to 256 frames, got 300"),
        (";base64," + base64.b64encode(moving).decode(), "16 frames of 3000 x 3000"),
    ):
        answer = ask(service, {"type": "video_url", "video_url": f"data:{data}"})
        assert answer.status == 400, answer.body
        assert answer.error["param"] == "messages[0].content[0].video_url"
        assert reason in answer.error["message"]
