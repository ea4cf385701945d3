"""Preprocessing against transformers' processors that work with Pillow and numpy: every value must be equal."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.multimodal.addresses import is_public
from quire.multimodal.families import gemma3, idefics3, internvl, llava, llava_next, pixtral, qwen_vl
from quire.multimodal.families.base import Frames
from quire.multimodal.pictures import MediaError, decode, decode_frames, picture, to_rgb
from quire.multimodal.preprocessing import read_settings
from support.seeing import picture as drawn

SIZES = [(60, 45), (45, 60), (200, 30), (31, 300), (224, 224), (7, 9), (337, 336), (1000, 701)]


def settings(processor, directory):
    """What a checkpoint says that was saved with this processor."""
    processor.save_pretrained(directory)
    return read_settings(directory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [56, 224])
def test_clips_pictures_have_transformers_values(tmp_path, size, side):
    processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    config = {"vision_config": {"image_size": side, "patch_size": 14}, "image_token_index": 5}
    pictures = llava.Pictures(config, settings(processor, tmp_path), str)
    expected = processor(drawn(1, *size), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(pictures.image(drawn(1, *size)).tensors["pixel_values"], expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("patch", "most"), [(14, 28 * 28 * 30), (14, 28 * 28 * 1280), (16, 100_000)])
def test_qwens_pictures_have_transformers_values(tmp_path, size, patch, most):
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": 56 * 56, "longest_edge": most})
    config = {"vision_config": {"patch_size": patch}, "model_type": "qwen2_vl"}
    pictures = qwen_vl.Pictures(config, settings(processor, tmp_path), str)
    expected = processor(drawn(2, *size), return_tensors="np")
    made = pictures.image(drawn(2, *size))
    assert made.tensors["grid"].tolist() == expected["image_grid_thw"][0].tolist()
    both = np.repeat(made.tensors["pixels"], 2, 2)  # of a picture, both frames are equal, and sent once
    assert np.array_equal(both.reshape(len(both), -1), expected["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("longest", "merge"), [(112, 1), (1024, 2)])
def test_pixtrals_pictures_have_transformers_values(tmp_path, size, longest, merge):
    processor = PixtralImageProcessorPil(
        size={"longest_edge": longest}, patch_size={"height": 14 * merge, "width": 14 * merge}
    )
    config = {"vision_config": {"patch_size": 14}, "spatial_merge_size": merge, "image_token_index": 5}
    pictures = pixtral.Pictures(config, settings(processor, tmp_path), lambda _: "[IMG]")
    expected = processor(drawn(5, *size), return_tensors="np")
    made = pictures.image(drawn(5, *size))
    assert np.array_equal(made.tensors["pixel_values"], expected["pixel_values"][0])
    assert made.text.count("[IMG]") == made.num_embeds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("crops", "most"), [(True, 12), (True, 4), (False, 12)])
def test_the_tiles_of_internvl_have_transformers_values(tmp_path, size, crops, most):
    processor = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=crops, max_patches=most)
    config = {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}}
    pictures = internvl.Pictures(config, settings(processor, tmp_path), lambda _: "*")
    expected = processor(drawn(6, *size), return_tensors="np")
    made = pictures.image(drawn(6, *size))
    assert np.array_equal(made.tensors["pixel_values"], expected["pixel_values"])
    assert made.text.count("*") == made.num_embeds == 4 * len(expected["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_the_tiles_of_idefics_have_transformers_values(tmp_path, size, splits):
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 224}, max_image_size={"longest_edge": 56}, do_image_splitting=splits
    )
    config = {"vision_config": {"image_size": 56, "patch_size": 14}}
    pictures = idefics3.Pictures(config, settings(processor, tmp_path), str)
    expected = processor(drawn(4, *size), return_tensors="np", return_row_col_info=True)
    made = pictures.image(drawn(4, *size))
    assert np.array_equal(made.tensors["pixel_values"], expected["pixel_values"][0])
    rows, columns = expected["rows"][0][0], expected["cols"][0][0]
    assert made.text.count("<row_") == rows * columns


TILED = [[56, 56], [56, 112], [112, 56], [112, 112], [56, 168], [168, 168]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_the_tiles_of_llava_have_transformers_values(tmp_path, size, kind):
    processor, vision = LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56}), "siglip_vision_model"
    if kind == "llava_next":
        crop = {"crop_size": {"height": 56, "width": 56}}
        processor, vision = LlavaNextImageProcessorPil(size={"shortest_edge": 56}, **crop), "clip_vision_model"
    config = {
        "model_type": kind,
        "image_grid_pinpoints": TILED,
        "image_token_index": 5,
        "video_token_index": 6,
        "vision_config": {"image_size": 56, "patch_size": 14, "model_type": vision},
        "vision_feature_select_strategy": "default" if kind == "llava_next" else "full",
    }
    pictures = llava_next.Pictures(config, settings(processor, tmp_path), str)
    expected = processor(drawn(7, *size), return_tensors="np", image_grid_pinpoints=TILED)
    made = pictures.image(drawn(7, *size))
    assert np.array_equal(made.tensors["pixel_values"], expected["pixel_values"][0])
    assert made.tensors["size"].tolist() == expected["image_sizes"][0].tolist()
    assert made.text == "5" * made.num_embeds


@pytest.mark.parametrize("size", SIZES)
def test_gemmas_pictures_have_transformers_values(tmp_path, size):
    processor = Gemma3ImageProcessorPil(size={"height": 112, "width": 112})
    config = {"vision_config": {"image_size": 112}, "mm_tokens_per_image": 16}
    pictures = gemma3.Pictures(config, settings(processor, tmp_path), str)
    expected = processor(drawn(3, *size), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(pictures.image(drawn(3, *size)).tensors["pixel_values"], expected)


def test_the_frames_of_a_video_are_those_of_its_pictures():
    pictures = qwen_vl.Pictures({"vision_config": {}, "model_type": "qwen2_5_vl"}, {}, str)
    images = [drawn(i, 60, 60) for i in range(3)]
    made = pictures.video(Frames(images, fps=4.0))
    alone = [pictures.image(image).tensors["pixels"] for image in images]
    assert made.tensors["grid"].tolist() == [2, 4, 4]
    assert (made.grid, made.num_embeds, made.seconds) == ((2, 2, 2), 8, 0.5)
    halves = made.tensors["pixels"].reshape(2, 16, 3, 2, 14, 14)
    for pair, frame, image in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):
        assert np.array_equal(halves[pair, :, :, frame], alone[image][:, :, 0])


def test_very_long_pictures_are_refused():
    pictures = qwen_vl.Pictures({"vision_config": {}, "model_type": "qwen2_vl"}, {}, str)
    with pytest.raises(MediaError, match="200 times"):
        pictures.image(drawn(1, 2000, 4))


def saved(image: Image.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_pictures_are_upright_in_rgb_and_on_white():
    image = drawn(1)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decode(saved(image, "JPEG", exif=exif)).size == (image.height, image.width)
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert decode(saved(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    for mode in ("L", "1", "P", "CMYK", "I;16", "LA"):
        assert to_rgb(image.convert("L").convert(mode) if mode != "CMYK" else image.convert(mode)).mode == "RGB"
    assert np.array_equal(np.asarray(picture(np.asarray(image))), np.asarray(image))
    for wrong in (np.zeros((4, 4)), np.zeros((4, 4, 3)), "x", None, np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(MediaError):
            picture(wrong)


def test_frames_of_an_animation_are_evenly_spaced():
    frames = [drawn(i, 20, 20) for i in range(10)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=200)
    found, rate = decode_frames(data, most=4)
    assert len(found) == 4
    assert rate == 2.0  # 4 of 10 frames, which are shown for two seconds
    assert decode_frames(saved(frames[0], "GIF"))[1] == 1.0
    assert decode(data).size == (20, 20)
    with pytest.raises(MediaError):
        decode_frames(data[:30])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("172.20.0.1", False),
        ("192.168.1.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_which_addresses_are_public(address, public):
    assert is_public(address) == public
