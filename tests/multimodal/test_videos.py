"""Videos: the encoders' embeddings and the rotary positions equal those of transformers.

Its video processors need torchvision, so the frames are preprocessed as pictures here, and stacked in pairs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.worker.media import tensor_of
from quire_multimodal.families.base import Frames
from support.engines import make_llm, runner_of
from support.seeing import FIRST, MODELS, picture, prepared

MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_videos_embeddings_and_positions_equal_transformers(folder, name):
    path, _ = prepared(name, folder)
    network = type(MODELS[name].make()).from_pretrained(path, dtype=torch.float32).eval()
    llm = make_llm(path, max_num_seqs=8)
    frames = Frames([picture(i, 112, 84) for i in range(5)], fps=2.0)
    prompt = {"prompt": f"See {MARK} here.", "multi_modal_data": {"video": frames}}
    request = llm.processor.process("v", prompt, SamplingParams()).core_requests[0]
    [item] = request.media
    tensors = {n: tensor_of(buffer, torch.device("cpu")) for n, buffer in item.tensors.items()}
    assert tensors["grid"].tolist() == [3, 6, 8]
    with torch.inference_mode():
        ours = runner_of(llm).model.tower("video", tensors)
        found = network.model.get_video_features(tensors["pixels"].flatten(1), tensors["grid"][None])
    expected = torch.cat(list(found.pooler_output))
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    ids = torch.tensor([request.prompt_token_ids])
    extra = {"second_per_grid_ts": torch.tensor([1.0])} if name == "qwen2_5_vl" else {}
    positions, _ = network.model.get_rope_index(
        ids, mm_token_type_ids=(ids == FIRST + 1).int() * 2, video_grid_thw=tensors["grid"][None], **extra
    )
    made = np.frombuffer(request.rotary_positions, np.int32).reshape(3, -1)
    end = item.place.end  # transformers 5 lets the text behind a long video begin before its last frame
    assert torch.equal(torch.tensor(made[:, :end].copy()).long(), positions[:, 0, :end])


def test_the_videos_of_onevision_equal_transformers(folder):
    path, _ = prepared("llava_onevision", folder)
    network = type(MODELS["llava_onevision"].make()).from_pretrained(path, dtype=torch.float32).eval()
    llm = make_llm(path, max_num_seqs=8)
    frames = [picture(i, 80, 56) for i in range(3)]
    prompt = {"prompt": "See <video> here.", "multi_modal_data": {"video": [frames]}}
    [item] = llm.processor.process("v", prompt, SamplingParams()).core_requests[0].media
    tensors = {n: tensor_of(buffer, torch.device("cpu")) for n, buffer in item.tensors.items()}
    with torch.inference_mode():
        ours = runner_of(llm).model.tower("video", tensors)
        [expected] = network.model.get_video_features(tensors["pixel_values"][None]).pooler_output
    assert ours.shape == (3 * 4 + 1, 64)
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_video_is_answered_and_shares_its_embeddings(folder):
    path, _ = prepared("qwen2_5_vl", folder)
    llm = make_llm(path, max_num_seqs=8, max_num_batched_tokens=24)
    frames = [picture(i, 84, 84) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt": f"See {MARK} here.", "multi_modal_data": {"video": [frames]}} for _ in range(2)]
    first, second = llm.generate(prompts, params, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    again = llm.generate(prompts[:1], params, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 16
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
