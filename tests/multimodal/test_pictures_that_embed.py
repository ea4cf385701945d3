"""Models that see make vectors of pictures and texts: those of transformers."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, PoolingParams
from quire.engine.pooling import PoolingError
from support.pooling_families import WITH_PICTURES
from support.seeing import MODELS, tokenizer, write


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


def test_a_model_of_text_takes_no_pictures(tmp_path):
    from PIL import Image

    llm = LLM(runner="pooling")
    with pytest.raises((ValueError, PoolingError), match="takes text only"):
        llm.embed([{"prompt": "a", "multi_modal_data": {"image": [Image.new("RGB", (8, 8))]}}])
