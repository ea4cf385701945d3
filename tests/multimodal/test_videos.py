"""Videos: the encoders' embeddings and the rotary positions equal those of transformers.

Its video processors need torchvision, so the frames are preprocessed as pictures here, and stacked in pairs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.multimodal.families.base import Frames
from quire.multimodal.families.qwen_vl import Pictures
from quire.worker.media import tensor_of
from support.engines import make_llm, runner_of
from support.seeing import FIRST, MODELS, picture, prepared

MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_videos_embeddings_and_positions_equal_transformers(folder, name):
    path, _ = prepared(name, folder)
    network = type(MODELS[name].make()).from_pretrained(path, dtype=torch.float32).eval()
    llm = make_llm(path, max_num_seqs=8)
    frames = Frames([picture(i, 112, 84) for i in range(5)], fps=2.0)
    prompt = {"prompt": f"See {MARK} here.", "multi_modal_data": {"video": frames}}
    request = llm.processor.process("v", prompt, SamplingParams()).core_requests[0]
    [item] = request.media
    tensors = {n: tensor_of(buffer, torch.device("cpu")) for n, buffer in item.tensors.items()}
    assert tensors["grid"].tolist() == ([3, 10, 12] if name in ("qwen3_vl", "qwen3_5") else [3, 6, 8])
    with torch.inference_mode():
        ours = runner_of(llm).media.tower("video", tensors)
        found = network.model.get_video_features(tensors["pixels"].flatten(1), tensors["grid"][None])
    expected = torch.cat(list(found.pooler_output))
    if name == "qwen3_vl":  # what is added to later layers follows
        expected = torch.cat([expected, *(torch.cat(list(level)) for level in found.deepstack_features)], 1)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    ids = torch.tensor([request.prompt_token_ids])
    extra = {"second_per_grid_ts": torch.tensor([1.0])} if name == "qwen2_5_vl" else {}
    positions, _ = network.model.get_rope_index(
        ids, mm_token_type_ids=(ids == FIRST + 1).int() * 2, video_grid_thw=tensors["grid"][None], **extra
    )
    made = np.frombuffer(request.rotary_positions, np.int32).reshape(3, -1)
    end = item.place.end  # transformers 5 lets the text behind a long video begin before its last frame
    assert torch.equal(torch.tensor(made[:, :end].copy()).long(), positions[:, 0, :end])


def test_qwen3_vl_reads_times_between_the_frames(folder):
    from transformers import Qwen3VLProcessor

    path, _ = prepared("qwen3_vl", folder)
    llm = make_llm(path, max_num_seqs=8)
    frames = Frames([picture(i, 112, 84) for i in range(5)], fps=2.0)
    prompt = {"prompt": f"See {MARK} here.", "multi_modal_data": {"video": frames}}
    request = llm.processor.process("v", prompt, SamplingParams()).core_requests[0]
    pad, start, end = FIRST + 1, FIRST + 2, FIRST + 3
    encode = llm.frontend.tokenizer.encode
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(5)), 2.0, 2)
    expected = encode("See ")
    for time in times:
        expected += [*encode(f"<{time:.1f} seconds>", False), start, *[pad] * (5 * 6), end]
    assert request.prompt_token_ids == [*expected, *encode(" here.", False)]


@pytest.mark.parametrize("frames", [2, 4, 5, 40])
@pytest.mark.parametrize("size", [(100, 80), (1920, 1080), (20, 300), (640, 641)])
def test_sizes_of_videos_equal_transformers(size, frames):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    family = Pictures({"model_type": "qwen3_vl", "vision_config": {}}, {}, str)
    least, most = family.limits_of_videos
    height, width = smart_resize(frames, size[1], size[0], factor=32, min_pixels=least, max_pixels=most)
    assert family._size(*size, family.limits_of_videos, frames) == (width, height)


def test_the_videos_of_onevision_equal_transformers(folder):
    path, _ = prepared("llava_onevision", folder)
    network = type(MODELS["llava_onevision"].make()).from_pretrained(path, dtype=torch.float32).eval()
    llm = make_llm(path, max_num_seqs=8)
    frames = [picture(i, 80, 56) for i in range(3)]
    prompt = {"prompt": "See <video> here.", "multi_modal_data": {"video": [frames]}}
    [item] = llm.processor.process("v", prompt, SamplingParams()).core_requests[0].media
    tensors = {n: tensor_of(buffer, torch.device("cpu")) for n, buffer in item.tensors.items()}
    with torch.inference_mode():
        ours = runner_of(llm).media.tower("video", tensors)
        [expected] = network.model.get_video_features(tensors["pixel_values"][None]).pooler_output
    assert ours.shape == (3 * 4 + 1, 64)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_the_frames_of_internvl_are_tiles_between_pictures(folder):
    """Their embeddings are those of pictures of one tile, and the tokens are the same as those of pictures."""
    path, _ = prepared("internvl", folder)
    llm = make_llm(path, max_num_seqs=8)
    family = llm.processor.media._family
    frames, alone = [picture(i, 90, 70) for i in range(3)], picture(7, 64, 64)
    text = f"First <video>, then {family.text} and <video>."
    prompt = {"prompt": text, "multi_modal_data": {"image": [alone], "video": [frames, frames[:1]]}}
    request = llm.processor.process("v", prompt, SamplingParams()).core_requests[0]
    embeds = f"<img>{family.text * family.of_tile}</img>"
    shown = "\n".join(f"Frame{i}: {embeds}" for i in (1, 2, 3))
    expected = f"First {shown}, then {embeds} and Frame1: {embeds}."
    encode = llm.frontend.tokenizer.encode
    assert request.prompt_token_ids == encode(expected)
    assert [item.modality for item in request.media] == ["video", "image", "video"]
    ids = {"prompt_token_ids": encode(text), "multi_modal_data": prompt["multi_modal_data"]}
    assert llm.processor.process("i", ids, SamplingParams()).core_requests[0].prompt_token_ids == encode(expected)
    network = type(MODELS["internvl"].make()).from_pretrained(path, dtype=torch.float32).eval()
    for item in request.media:
        pixels = tensor_of(item.tensors["pixel_values"], torch.device("cpu"))
        with torch.inference_mode():
            ours = runner_of(llm).media.tower(item.modality, {"pixel_values": pixels})
            theirs = network.model.get_image_features(pixels).pooler_output
        assert sum(count for _, count in item.place.spans) == len(ours)
        assert (ours - theirs.flatten(0, 1)).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_is_answered_and_shares_its_embeddings(folder, name):
    path, _ = prepared(name, folder)
    llm = make_llm(path, max_num_seqs=8, max_num_batched_tokens=24)
    frames = [picture(i, 84, 84) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt": f"See {MARK} here.", "multi_modal_data": {"video": [frames]}} for _ in range(2)]
    first, second = llm.generate(prompts, params, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    again = llm.generate(prompts[:1], params, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
