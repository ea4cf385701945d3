"""Models whose text layers are Quire's, and whose encoder and preprocessing are transformers' code.

`tests/models/test_every_family.py` compares each of them with transformers, on prompts with pictures.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from quire.config.engine import ConfigError
from quire.messages.sampling_params import SamplingParams
from quire.models.towers.transformers import _check_mask
from quire.models.transformers_backend.preprocessing import _number
from quire.models.transformers_backend.published import translated
from quire.multimodal.families.base import Prepared
from quire.multimodal.families.transformers import composed
from support.engines import make_llm, runner_of
from support.every_family import build, families, write
from support.every_processor import make, with_small_pictures
from support.seeing import picture
from support.server import request
from support.server_process import Server
from support.tiny_configs import shrunk

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endfor %}"
)


def written(model_type: str, folder: Path) -> Path:
    """A tiny checkpoint of the first model of this type that sees."""
    family = next(family for family in families(model_type) if family.sees)
    processor = make(model_type, with_small_pictures(shrunk(CONFIG_MAPPING[model_type]())))
    network, _ = build(family, processor)
    folder.mkdir()
    write(family, network, folder, processor)
    return folder


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    return written("lighton_ocr", tmp_path_factory.mktemp("light") / "model")


def prompt(text: str, *numbers: int) -> dict[str, object]:
    return {"prompt": text, "multi_modal_data": {"image": [picture(number) for number in numbers]}}


def test_a_picture_changes_the_answer_and_its_prefix_is_cached(light):
    llm = make_llm(light, max_model_len=256, max_num_batched_tokens=16, max_num_seqs=4)
    long = "A long beginning that fills more than a block of the cache. " + "<image> and "
    first, again, other = (
        llm.generate([prompt(long + "what is it?", number)], PARAMS, use_tqdm=False)[0] for number in (1, 1, 2)
    )
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids
    assert again.num_cached_tokens > other.num_cached_tokens > 0


def test_only_the_encoders_weights_are_loaded_by_transformers(light):
    llm = make_llm(light, max_model_len=256)
    tower = runner_of(llm).media.tower
    assert not [name for name in tower.tensors if "language_model" in name or "lm_head" in name]
    assert any("vision" in name for name in tower.tensors)


def test_without_pictures_no_processor_is_needed(light, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(light / name)
    llm = make_llm(tmp_path, max_model_len=256, language_model_only=True)
    [answer] = llm.generate(["A text"], PARAMS, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 12


def test_random_weights_are_those_of_a_new_model(light, tmp_path):
    for file in light.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    llm = make_llm(tmp_path, max_model_len=256, load_format="dummy")
    assert all(tensor.isfinite().all() for tensor in runner_of(llm).media.tower.tensors.values())
    [answer] = llm.generate([prompt("<image>", 1)], PARAMS, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 12


def test_a_processor_that_reads_the_text_around_a_picture_is_refused(tmp_path):
    folder = written("idefics2", tmp_path / "model")
    with pytest.raises(ValueError, match="what Idefics2Processor makes of an item depends on the rest of the prompt"):
        make_llm(folder, max_model_len=256)


def test_a_missing_tensor_of_the_encoder_is_named(light, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in light.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(light / "model.safetensors")
    name = next(name for name in tensors if "vision" in name)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the encoder's tensors do not fit; missing"):
        make_llm(tmp_path, max_model_len=256)


@pytest.mark.parametrize("sees", ["all", "behind"])
def test_tokens_that_see_those_behind_them_are_refused(sees):
    def causal(batch, head, query, keys):
        return keys <= query

    def whole(batch, head, query, keys):
        return keys >= 0

    def mask(function):
        made = torch.zeros(1, 1, 1, 1)
        made.function = function
        return made

    _check_mask(mask(causal), 4)
    _check_mask({"full_attention": mask(causal), "sliding_attention": None}, 4)
    with pytest.raises(ValueError, match="also see those behind them"):
        _check_mask({"full_attention": mask(whole)} if sees == "all" else mask(whole), 4)


def test_rotary_positions_of_text_continue_after_the_largest_of_an_item():
    grid = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    made = composed(9, [(2, grid)])
    assert made.tolist() == [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]]


def test_rotary_positions_before_the_text_are_never_negative():
    halo = np.array([[0, 0], [-1, 0], [-1, 0]])
    assert composed(3, [(0, halo)]).tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 1]]
    assert composed(4, [(1, halo)]).tolist() == [[0, 1, 1, 2], [0, 0, 1, 2], [0, 0, 1, 2]]


def test_items_are_numbered_as_in_the_prompt_of_the_processor():
    assert _number("<id>0</id><p>", "<id>1</id><p>") == ("<id>", 0)
    assert _number("<p1>", "<p2>") == ("<p", 1)
    for other in (("<p>", "<p>"), ("<p0><p0>", "<p1><p1>"), ("a", "b"), ("<p0>", "<p2>")):
        assert _number(*other) is None
    made = Prepared({}, "<id>0</id><p>", 1, numbered=("<id>", 0))
    assert [made.text_at(index) for index in (0, 1, 12)] == ["<id>0</id><p>", "<id>1</id><p>", "<id>12</id><p>"]
    assert Prepared({}, "<p>", 1).text_at(3) == "<p>"


def test_configs_of_checkpoints_in_other_layouts_are_translated():
    vision = {"vt_hidden_size": 64, "init_pos_emb_height": 8, "patch_size": 14, "projector_ln_eps": 1e-4}
    kimi = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"model_type": "kimi_k2", "hidden_size": 32},
        "vision_config": vision,
        "media_placeholder_token_id": 7,
    }
    made = translated(kimi)
    assert made["model_type"] == "kimi_k25"
    assert made["text_config"] == {"model_type": "deepseek_v3", "hidden_size": 32}
    assert made["vision_config"] == {"hidden_size": 64, "pos_emb_height": 8, "patch_size": 14}
    assert (made["image_token_id"], made["projection_hidden_size"], made["projection_layer_norm_eps"]) == (7, 64, 1e-4)
    other = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    assert translated(other) is other


def test_settings_that_the_processor_cannot_use_are_refused(light):
    with pytest.raises(ConfigError, match="mm_processor_kwargs"):
        make_llm(light, max_model_len=256, mm_processor_kwargs={"size": "large"})


@pytest.mark.slow
def test_a_server_gives_the_same_answer_and_its_api_process_imports_no_torch(light, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, pathlib, sys\n"
        "def report():\n"
        "    pathlib.Path(__file__).with_name(f'{os.getpid()}.txt').write_text(str('torch' in sys.modules))\n"
        "atexit.register(report)\n"
    )
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    [expected] = make_llm(light, max_model_len=256).generate([prompt("Look: <image>", 1)], PARAMS, use_tqdm=False)
    options = ("--dtype", "float32", "--max-model-len", "256", "--chat-template", str(tmp_path / "template.jinja"))
    paths = f"{tmp_path}:{Path(__file__).parents[1]}"
    with Server(str(light), *options, PYTHONPATH=paths) as server:
        kind = {"Content-Type": "application/json"}
        for _ in range(2):
            answer = request(server.url, "POST", "/v1/chat/completions", json.dumps(body).encode(), **kind)
            assert answer.status == 200, answer
            assert json.loads(answer.body)["choices"][0]["message"]["content"] == expected.outputs[0].text
        assert server.stop() == 0
        assert (tmp_path / f"{server.process.pid}.txt").read_text() == "False"
