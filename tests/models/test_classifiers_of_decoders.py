"""Classifiers of every family of decoders, on checkpoints made by rules: the scores are those of transformers.

Some families run each time, all of them nightly.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, PoolingParams
from support.checkpoints import byte_level_tokenizer
from support.every_family import draw_weights, prompts
from support.tiny_configs import Fields, repaired, shrunk

TEXTS = """arcee bloom deepseek_v3 exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox
    gpt_oss gptj hunyuan_v1_dense hunyuan_v1_moe jamba llama minicpm3 ministral ministral3 mistral mistral4 mixtral mpt
    nemotron olmo olmo2 olmo3 opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next
    seed_oss smollm3 stablelm starcoder2""".split()
TOKENS = """apertus arcee bloom exaone4 falcon gemma gemma2 glm gpt2 gpt_neox gpt_oss llama ministral3 mistral mixtral
    mpt nemotron persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 stablelm
    starcoder2""".split()


def saved(folder: Path, model_type: str, head: str) -> Any:
    """A random classifier with three labels."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    names = getattr(auto, f"MODEL_FOR_{head}_CLASSIFICATION_MAPPING_NAMES")
    model_class = getattr(transformers, names[model_type])
    config_class = transformers.CONFIG_MAPPING[model_type]
    made: list[Any] = []

    def attempt(fields: Fields) -> Exception | None:
        made.clear()
        try:
            torch.manual_seed(0)
            model = model_class(config_class(**{**deepcopy(fields), "num_labels": 3})).float().eval()
            draw_weights(model)
            with torch.no_grad():
                assert model(torch.tensor([prompts()[2]])).logits.isfinite().all()
            made.append(model)
        except Exception as error:  # validators and layers raise many kinds
            return error
        return None

    default = config_class()
    repaired(shrunk(default), default, attempt)
    made[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [names[model_type]]}))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return made[0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model_type", "head"), [(name, "SEQUENCE") for name in TEXTS] + [(name, "TOKEN") for name in TOKENS]
)
def test_scores_are_those_of_transformers(tmp_path, model_type, head):
    model = saved(tmp_path, model_type, head)
    with torch.no_grad():
        wanted = [model(torch.tensor([text])).logits[0] for text in prompts()]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=96)
    outputs = llm.encode(prompts(), PoolingParams(use_activation=False), use_tqdm=False)
    for output, theirs in zip(outputs, wanted, strict=True):
        ours = output.outputs.data
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 2e-4 * max(1.0, float(theirs.std(correction=0)))
