"""The encoder of pictures of the bundled model: pictures and phrasings that its training did not have."""

from __future__ import annotations

import base64
import importlib
import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model, local_model
from support.server import Host

NAME = "quire-demo/vision"


@pytest.fixture(scope="module")
def pictures() -> Any:
    tools = str(Path(__file__).parents[2] / "tools")
    sys.path.insert(0, tools)
    yield importlib.import_module("demo_pictures")
    sys.path.remove(tools)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(NAME)


def share_of_right_answers(pictures: Any, llm: LLM, count: int) -> float:
    asked = pictures.examination_of_pictures(count, seed=3)
    prompts = [{"prompt": each.prompt, "multi_modal_data": {"image": each.image}} for each in asked]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    answers = [output.outputs[0].text for output in outputs]
    return sum(pictures.is_right(each.kind, each.scene, text) for each, text in zip(asked, answers, strict=True)) / len(
        asked
    )


def test_the_files_are_small_and_repeat_no_weights():
    folder = local_model(NAME)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.partition(".")[0]: file for name, file in files.items()} == {
        "model": "../model/model.safetensors",
        "visual": "model.safetensors",
    }
    assert (folder / "../model").resolve() == bundled_model().resolve()


def test_training_has_no_phrasing_of_the_examination(pictures: Any):
    pictures.assert_held_out()


def test_it_says_what_it_sees(pictures: Any, llm: LLM):
    assert share_of_right_answers(pictures, llm, 40) >= 0.85


@pytest.mark.slow
def test_nearly_all_answers_are_right(pictures: Any, llm: LLM):
    assert share_of_right_answers(pictures, llm, 600) >= 0.95


def test_a_picture_need_not_be_square(pictures: Any, llm: LLM):
    scene, rng = pictures.Scene("heart", "green", 2), pictures.random.Random(5)
    for size in ((192, 192), (320, 240), (240, 400), (640, 240)):
        content = [
            {"type": "image_pil", "image_pil": pictures.draw(scene, rng, size)},
            {"type": "text", "text": "What do you see?"},
        ]
        params = SamplingParams(temperature=0, max_tokens=30)
        [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        assert output.outputs[0].text.strip() == "I see 2 green hearts.", size


def test_without_pictures_it_is_the_bundled_model(llm: LLM):
    prompts = ["Once upon a time", "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant"]
    params = SamplingParams(temperature=0, max_tokens=60)
    found = [
        [output.outputs[0].text for output in engine.generate(prompts, params, use_tqdm=False)]
        for engine in (llm, LLM())
    ]
    assert found[0] == found[1]
    assert "Paris" in found[0][1]


def test_a_picture_is_drawn_to_try_it(llm: LLM, pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The example of docs/multimodal.md."""
    monkeypatch.setattr(sys, "argv", ["demo_pictures.py", "3", "red", "star", str(tmp_path / "stars.png")])
    pictures.main()
    with Image.open(tmp_path / "stars.png") as image:
        assert image.size == (192, 192)
        content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "What do you see?"}]
        [output] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0), use_tqdm=False)
    page = (Path(__file__).parents[2] / "docs" / "multimodal.md").read_text()
    assert f"# {output.outputs[0].text}\n" in page
    assert output.outputs[0].text == "I see 3 red stars."


@pytest.mark.slow
def test_it_is_served(pictures: Any):
    """Several turns about one picture, which is sent as a data: URL."""
    host = Host(model=NAME, max_num_seqs=4, num_gpu_blocks_override=200)
    try:
        server, file = host.serve(), BytesIO()
        pictures.draw(pictures.Scene("star", "red", 3), pictures.random.Random(5)).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        messages: list[dict[str, Any]] = []
        for question, expected in (("What colour are they?", "red"), ("How many stars are there?", "3")):
            content = [{"type": "text", "text": question}]
            if not messages:
                content.insert(0, {"type": "image_url", "image_url": {"url": url}})
            messages.append({"role": "user", "content": content})
            body = {"messages": messages, "max_tokens": 30, "temperature": 0}
            answer = server.post("/v1/chat/completions", body).json["choices"][0]["message"]
            assert expected in answer["content"]
            messages.append(answer)
    finally:
        host.close()
