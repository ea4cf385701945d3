"""KV compression of requests with pictures: the tokens of a model with masks, however the work is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import ConfigError
from quire.config.kv_compression import KVCompressionOptions
from quire.engine.llm import LLM
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from support.compression import MaskedModel
from support.engines import assert_nothing_is_left, assert_preempted, generate, make_llm, tokens_of
from support.late_device import run_late
from support.seeing import FIRST, MODELS, prepared, tokenizer

FIELDS: dict[str, Any] = {"window": 8, "sinks": 2, "ratio": 3}
NUM_TOKENS = 60
# Tokens that stand for pictures are not generated, since transformers would count them.
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=list(range(FIRST)))


def make(path: Path, interval: int = 16, **options: Any) -> LLM:
    fields = {**FIELDS, "interval": interval}
    return make_llm(path, kv_compression=fields, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})


def answers(llm: LLM, name: str) -> list[RequestOutput]:
    """Of a picture before a question, of two pictures, of none, and of one that ends the prompt."""
    prompts = [{"prompt": t, **({"multi_modal_data": {"image": p}} if p else {})} for t, p in MODELS[name].prompts()]
    return generate(llm, prompts, PARAMS)


@torch.inference_mode()
def masked_answers(path: Path, name: str, interval: int) -> list[list[int]]:
    """What transformers says if each head sees only what it keeps. The text is compressed for the first time when as
    many tokens as the window follow the last one of a picture."""
    model = MODELS[name]
    network = type(model.make()).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    processor, options = (
        model.processor(tokenizer(model.tokens)),
        KVCompressionOptions.read(FIELDS | {"interval": interval}),
    )
    found, most = [], 0
    for text, pictures in model.prompts():
        inputs = dict(processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt"))
        prompt = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        masked = MaskedModel(network, inputs, FIRST)
        behind = [place + 1 + options.window for place, token in enumerate(prompt) if token == FIRST]
        found.append(masked.generate(options, prompt, NUM_TOKENS, options.ratio, max(behind, default=0)))
        most = max(most, len(masked.points))
    assert most >= (2 if interval else 1)
    return found


@pytest.mark.parametrize("interval", [0, 16], ids=["once", "again"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_tokens_are_those_of_a_model_with_masks(folder, name: str, interval: int) -> None:
    path, _ = prepared(name, folder)
    assert tokens_of(answers(make(path, interval), name)) == masked_answers(path, name, interval)


@pytest.mark.parametrize("way", ["chunked", "small encoder cache", "preempted", "two steps in flight"])
def test_tokens_do_not_depend_on_how_the_work_is_cut_up(folder, way: str) -> None:
    path, _ = prepared("llava", folder)
    outputs = answers(make(path), "llava")
    llm = make(path, **{"chunked": {"max_num_batched_tokens": 24}}.get(way, {}))
    if way == "small encoder cache":
        most = max(output.prompt_token_ids.count(FIRST) for output in outputs)
        llm = make(path, encoder_cache_size=most)
    if way == "preempted":
        longest = max(len(output.prompt_token_ids) for output in outputs) + NUM_TOKENS
        blocks = make(path, max_model_len=longest).core.scheduler.kv.max_blocks(longest)
        llm = make(path, max_model_len=longest, num_gpu_blocks_override=blocks + 2)
    if way == "two steps in flight":
        run_late(llm)
    assert tokens_of(answers(llm, "llava")) == tokens_of(outputs)
    if way == "preempted":
        assert_preempted(llm)
    assert_nothing_is_left(llm.core)


def test_pictures_whose_tokens_see_each_other_are_refused(folder) -> None:
    path, _ = prepared("gemma3", folder)
    with pytest.raises(ConfigError, match=r"kv_compression cannot be used with .*pictures|sliding windows"):
        make(path)
