"""Models with recurrent layers that see: their states remember pictures. Checkpoints as they are published."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.messages.sampling_params import SamplingParams
from quire.multimodal.families.base import Frames
from quire.worker.media import tensor_of
from support.engines import generate, make_llm, runner_of
from support.layers import draw
from support.layouts import edit_tensors
from support.reference import Continuation
from support.seeing import FIRST, MODELS, NUM_TOKENS, continuations, picture, prepared
from support.seeing_qwen import QWEN_MARK

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def prompt(text: str, pictures: list[Any]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else {"prompt": text}


@pytest.mark.slow
def test_cached_states_belong_to_the_picture_before_them(folder):
    """Each picture takes more than a block of tokens, and two blocks of the same text follow it."""
    path, _ = prepared("qwen3_5", folder)
    before, behind = "The same words come first: ", " and the same words follow, for longer than two whole blocks."
    asked = [(f"{before}{QWEN_MARK}{behind}", [picture(number, 160, 128)]) for number in (1, 2)]
    expected = continuations(path, MODELS["qwen3_5"], asked)
    llm = make_llm(path, max_num_batched_tokens=24, max_num_seqs=8)
    lengths = [len(continuation.prompt) for _, _, continuation in expected]
    start = expected[0][2].prompt.index(FIRST)
    assert (lengths[0] - 1) // 16 - (start + 20) // 16 >= 2
    whole = (lengths[0] - 1) // 16 * 16
    for number, cached in ((0, 0), (1, start // 16 * 16), (0, whole), (1, whole)):
        pictures, text, continuation = expected[number]
        [output] = generate(llm, [prompt(text, pictures)], PARAMS)
        assert output.prompt_token_ids == continuation.prompt
        assert output.num_cached_tokens == cached
        continuation.check(output.outputs[0].token_ids)
    assert expected[0][2].token_ids != expected[1][2].token_ids


def test_a_video_is_answered_as_transformers_answers_it(folder):
    path, _ = prepared("qwen3_5", folder)
    llm = make_llm(path, max_num_batched_tokens=24, max_num_seqs=8)
    asked = {
        "prompt": f"See {VIDEO} here.",
        "multi_modal_data": {"video": Frames([picture(i, 112, 84) for i in range(5)], 2.0)},
    }
    request = llm.processor.process("v", asked, SamplingParams()).core_requests[0]
    pixels, grid = (tensor_of(request.media[0].tensors[name], torch.device("cpu")) for name in ("pixels", "grid"))
    ids = torch.tensor([request.prompt_token_ids])
    network = type(MODELS["qwen3_5"].make()).from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        made = network.eval().generate(
            input_ids=ids,
            pixel_values_videos=pixels.flatten(1),
            video_grid_thw=grid[None],
            mm_token_type_ids=(ids == FIRST + 1).int() * 2,
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = Continuation(ids[0].tolist(), made[0, ids.shape[1] :].tolist(), NUM_TOKENS)
    for _ in range(2):  # the second time, from the prefix cache
        [output] = generate(llm, [asked], PARAMS)
        expected.check(output.outputs[0].token_ids)
    assert output.num_cached_tokens == (ids.shape[1] - 1) // 16 * 16


def stacked(tensors: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
    """One tensor for all experts of a layer: [experts, out, in] or, transposed, [experts, in, out]."""
    made = dict(tensors)
    for name in tensors:
        prefix, found, _ = name.partition("experts.0.down_proj.weight")
        if found:
            parts = {
                part: torch.stack([made.pop(f"{prefix}experts.{e}.{part}_proj.weight") for e in range(8)])
                for part in ("gate", "up", "down")
            }
            made[f"{prefix}experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
            made[f"{prefix}experts.down_proj"] = parts["down"]
    if transposed:
        made = {
            n: t.transpose(1, 2) if n.endswith(("experts.gate_up_proj", "experts.down_proj")) else t
            for n, t in made.items()
        }
    return made


def with_predict_layer(tensors: dict[str, Tensor], is_stacked: bool) -> dict[str, Tensor]:
    """The tensors as they are published, with a layer that predicts further tokens. is_stacked: whether its experts are
    in one tensor, too, as in Qwen3.6, and not in Qwen3.5."""
    last, hidden = "model.language_model.layers.3.", 64
    more = {n.replace(last, "mtp.layers.0."): t.clone() for n, t in tensors.items() if n.startswith(last)}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        more[f"mtp.{name}.weight"] = draw(name, hidden) * 0.1
    more["mtp.fc.weight"] = draw("fc", hidden, 2 * hidden) * 0.1
    return stacked(tensors, False) | (stacked(more, False) if is_stacked else more)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["qwen3.5", "qwen3.6"])
def test_a_published_checkpoint_with_experts_makes_its_own_drafts(folder, tmp_path, layout):
    path, expected = prepared("qwen3_5_moe", folder)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    edit_tensors(tmp_path, lambda tensors, config: with_predict_layer(tensors, layout == "qwen3.6"))
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    llm = make_llm(tmp_path, max_num_batched_tokens=48, max_num_seqs=8, speculative_config=drafts)
    outputs = generate(llm, [prompt(text, pictures) for pictures, text, _ in expected], PARAMS)
    for (_, _, continuation), output in zip(expected, outputs, strict=True):
        continuation.check(output.outputs[0].token_ids)
    layers = runner_of(llm).drafter.forward.model
    [table], seen = layers.rotary, []

    def noted(positions: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(int(positions.max()))
        return table(positions)

    layers.rotary = [noted]
    [output] = generate(llm, [prompt(f"{QWEN_MARK}?", [picture(1, 160, 128)])], PARAMS)
    length = len(output.prompt_token_ids)  # the picture has 20 tokens, but no more than 5 positions
    assert length - 15 < max(seen) < length - 15 + NUM_TOKENS + 3


@pytest.mark.parametrize(
    "ranks",
    [{}, pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=pytest.mark.slow)],
    ids=["one rank", "experts on two ranks"],
)
def test_a_published_qwen3_vl_with_experts_says_the_same(folder, tmp_path, ranks):
    """transformers 5 saves [experts, out, in], and the published files have [experts, in, out]."""
    path, expected = prepared("qwen3_vl_moe", folder)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    edit_tensors(tmp_path, lambda tensors, config: stacked(tensors, transposed=True))
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["rope_scaling"] = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = config["text_config"]["rope_scaling"].pop("rope_theta")
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = make_llm(tmp_path, max_num_batched_tokens=24, max_num_seqs=8, **ranks)
    for pictures, text, continuation in expected[:2]:
        [output] = generate(llm, [prompt(text, pictures)], PARAMS)
        continuation.check(output.outputs[0].token_ids)
