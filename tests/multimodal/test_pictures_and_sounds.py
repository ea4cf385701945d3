"""Models with pictures and sounds that transformers' code encodes give the same tokens as transformers: in chunks and
batches, on warm caches, and preempted. In large Gemma 4 models, the tokens of a picture see each other in layers with a
window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from quire.engine.llm import LLM
from quire.layers.attention import Attention
from quire.messages.sampling_params import SamplingParams
from support.engines import assert_preempted, make_llm
from support.every_family import build, continued_items, families, write
from support.every_processor import Made, hearing, inputs, items, make, with_small_pictures
from support.tiny_configs import shrunk

LARGE = {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def written(model_type: str, folder: Path, text: dict[str, Any] | None = None) -> tuple[Path, Made, Any]:
    family = next(family for family in families(model_type) if family.sees)
    processor = make(model_type, with_small_pictures(shrunk(CONFIG_MAPPING[model_type]())))
    network, _ = build(family, processor, text)
    write(family, network, folder, processor)
    return folder, processor, network


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return written("gemma4", tmp_path_factory.mktemp("large"), LARGE)


def wrong(llm: LLM, made: Made, network: Any) -> int:
    judged = list(continued_items(llm, made, network))
    assert sum(tied for _, tied, _ in judged) < sum(count for _, _, count in judged) / 4
    return sum(found for found, _, _ in judged)


def differences(llm: LLM, made: Made, network: Any) -> list[float]:
    """By how much the log probabilities of the first tokens are not those of transformers, for each prompt."""
    found = []
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    for text, given in items(made):
        fields = {"prompt": text, "multi_modal_data": {"image": given} if given else {}}
        [answer] = llm.generate([fields], params, use_tqdm=False)
        with torch.inference_mode():
            expected = network(**inputs(made, text, given), use_cache=False).logits[0, -1].log_softmax(-1)
        [first] = answer.outputs[0].logprobs
        found.append(max(abs(made_of.logprob - expected[token].item()) for token, made_of in first.items()))
    return found


@pytest.mark.parametrize("chunk", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_the_tokens_of_a_picture_see_each_other(large, chunk):
    folder, made, network = large
    llm = make_llm(folder, max_model_len=512, max_num_batched_tokens=chunk, max_num_seqs=4)
    assert max(differences(llm, made, network)) < 1e-3
    assert wrong(llm, made, network) == 0


@pytest.mark.slow
def test_without_that_or_with_it_in_all_layers_results_would_differ(large, monkeypatch):
    folder, made, network = large
    for value in (False, True):
        llm = make_llm(folder, max_model_len=512, max_num_batched_tokens=80, max_num_seqs=4)
        with monkeypatch.context() as patch:
            same = property(lambda self, value=value: value, lambda self, given: None)
            patch.setattr(Attention, "looks_ahead", same, raising=False)
            found = differences(llm, made, network)
        assert [difference > 0.01 for difference in found] == [bool(given) for _, given in items(made)]


def test_preempted_prompts_with_pictures_continue_as_before(large):
    folder, made, _ = large
    text, given = items(made)[0]
    fields = {"prompt": text, "multi_modal_data": {"image": given}}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    wide = make_llm(folder, max_model_len=160, max_num_batched_tokens=80, max_num_seqs=4)
    [expected] = wide.generate([fields], params, use_tqdm=False)
    needed = wide.core.scheduler.kv.max_blocks(160)
    narrow = make_llm(
        folder, max_model_len=160, max_num_batched_tokens=80, max_num_seqs=4, num_gpu_blocks_override=needed + 3
    )
    for answer in narrow.generate([fields] * 6, params, use_tqdm=False):
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert_preempted(narrow)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma4", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_sounds_give_the_tokens_of_transformers(tmp_path, model_type):
    folder, made, network = written(model_type, tmp_path)
    llm = make_llm(folder, max_model_len=512, max_num_batched_tokens=48, max_num_seqs=4)
    assert wrong(llm, hearing(made), network) == 0
