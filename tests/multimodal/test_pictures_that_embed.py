"""Models that see make vectors of pictures and texts: those of transformers."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
import torch

from quire import LLM, PoolingParams
from quire.engine.pooling import PoolingError
from support.layouts import edit_tensors
from support.pooling_families import LATE_INTERACTION, WITH_PICTURES
from support.seeing import MODELS, picture, tokenizer, write
from support.server import Host

DIM = 24


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*WITH_PICTURES.values(), "qwen3_vl"])
def test_the_last_hidden_state_is_that_of_transformers(tmp_path, name):
    model = MODELS[name]
    write(tmp_path, model)
    network = type(model.make()).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    processor = model.processor(tokenizer(model.tokens))
    prompts, wanted = [], []
    for text, pictures in model.prompts():
        inputs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        with torch.no_grad():
            wanted.append(network.model(**inputs).last_hidden_state[0, -1])
        prompts.append({"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {})})
    llm = LLM(str(tmp_path), runner="pooling", dtype="float32")
    for params in (PoolingParams(use_activation=False), PoolingParams(task="embed", use_activation=False)):
        outputs = llm.encode(prompts, params, use_tqdm=False)
        for output, theirs in zip(outputs, wanted, strict=True):
            ours = output.outputs.data
            assert (ours - theirs).abs().max() <= 2e-4 * max(1.0, float(theirs.std()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LATE_INTERACTION)
def test_a_vector_for_each_token_of_pictures_and_texts(tmp_path, name):
    family = LATE_INTERACTION[name]
    model = MODELS[family.model]
    write(tmp_path, model)
    network = type(model.make()).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    hidden = network.config.text_config.hidden_size
    torch.manual_seed(0)
    linear = torch.nn.Linear(hidden, DIM, family.bias).requires_grad_(False)

    def edit(tensors, config):
        made = {
            re.sub(r"^model\.", family.prefix, key): tensor for key, tensor in tensors.items() if "lm_head" not in key
        }
        made |= {f"{family.linear}.{key}": tensor for key, tensor in linear.state_dict().items() if family.linear}
        return made

    edit_tensors(tmp_path, edit)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name], family.size_field: DIM}))
    processor = model.processor(tokenizer(model.tokens))
    llm = LLM(str(tmp_path), dtype="float32")
    for text, pictures in model.prompts():
        inputs = processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        with torch.no_grad():
            states = network.model(**inputs).last_hidden_state[0]
            wanted = torch.nn.functional.normalize(linear(states) if family.linear else states, dim=-1)
        prompt = {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {})}
        [output] = llm.encode([prompt], use_tqdm=False)
        assert output.outputs.data.shape == wanted.shape
        assert (output.outputs.data - wanted).abs().max() <= 1e-4


def test_a_model_of_text_takes_no_pictures(tmp_path):
    from PIL import Image

    llm = LLM(runner="pooling")
    with pytest.raises((ValueError, PoolingError), match="takes text only"):
        llm.embed([{"prompt": "a", "multi_modal_data": {"image": [Image.new("RGB", (8, 8))]}}])


def test_a_chat_with_a_picture_is_embedded_over_http(tmp_path):
    """The same vector as in Python, where the chat template puts the picture's mark before the text."""
    model = MODELS["llava_next"]
    write(tmp_path, model)
    template = (
        "{% for m in messages %}{% for part in m.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    options = {"runner": "pooling", "dtype": "float32", "chat_template": template}
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "abc"}]
    host = Host(model=str(tmp_path), **options)
    try:
        body = {"messages": [{"role": "user", "content": parts}]}
        answer = host.serve().post("/v1/embeddings", body)
        assert answer.status == 200, answer.body
        data = {"image": [picture(1)]}
        prompt = {"prompt": "<image>abc", "multi_modal_data": data}
        [output] = LLM(str(tmp_path), **options).embed([prompt], add_special_tokens=False, use_tqdm=False)
        assert answer.json["data"][0]["embedding"] == pytest.approx(output.outputs.embedding, abs=1e-5)
        assert answer.json["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    finally:
        host.close()
