"""Models with transformers' encoder of sounds and Quire's preprocessing: tokens are those of transformers.

They are equal however the work is cut up. Models with transformers' preprocessing are in
`tests/models/test_every_family.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from quire import PoolingParams
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from support.engines import assert_preempted, generate, make_llm
from support.every_family import build, families, write
from support.every_processor import make
from support.hearing_families import (
    FAMILIES,
    MARK,
    PROMPTS,
    RATE,
    aligner,
    expected_prompt,
    judged,
    network_of,
    sounds_of,
    written,
)
from support.tiny_configs import shrunk

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def check(llm: LLM, kind: str, times: int = 1) -> None:
    texts = [(text, sounds_of(numbers)) for text, numbers in PROMPTS] * times
    prompts: list[dict[str, Any]] = [
        {"prompt": text, **({"multi_modal_data": {"audio": [(s, RATE) for s in sounds]}} if sounds else {})}
        for text, sounds in texts
    ]
    count = 0
    ties = 0
    for (text, sounds), output in zip(texts, generate(llm, prompts, PARAMS), strict=True):
        expected, inputs = expected_prompt(kind, text, sounds)
        assert output.prompt_token_ids == expected
        wrong, tied = judged(kind, expected, inputs, output.outputs[0].token_ids)
        assert not wrong
        count += len(output.outputs[0].token_ids)
        ties += tied
    assert ties <= count / 4


def in_a_batch(make: MakeLLM, kind: str) -> None:
    llm = make()
    for _ in range(2):  # the second time, on a warm prefix cache
        check(llm, kind)


def in_chunks(make: MakeLLM, kind: str) -> None:
    check(make(max_num_batched_tokens=24, encoder_cache_size=60), kind)


def preempted(make: MakeLLM, kind: str) -> None:
    llm = make(num_gpu_blocks_override=14, max_model_len=200)
    check(llm, kind, 2)
    assert_preempted(llm)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [in_a_batch, in_chunks, preempted], ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_encoder(tmp_path, kind, way):
    path = written(kind, tmp_path)
    way(lambda **options: make_llm(path, **{"max_num_seqs": 8, "max_model_len": 256, **options}), kind)


def test_a_forced_aligner_scores_the_times_of_each_token(tmp_path):
    llm = LLM(str(aligner(tmp_path)), dtype="float32")
    text, numbers = PROMPTS[1]
    sounds = sounds_of(numbers)
    expected, inputs = expected_prompt("qwen3_asr", text, sounds)
    with torch.no_grad():
        logits = network_of("qwen3_asr")(input_ids=torch.tensor([expected]), **inputs).logits[0]
    prompt = {"prompt": text, "multi_modal_data": {"audio": [(samples, RATE) for samples in sounds]}}
    [output] = llm.encode([prompt], PoolingParams(task="token_classify"), use_tqdm=False)
    assert output.outputs.data.shape == logits.shape
    assert (output.outputs.data - logits.softmax(-1)).abs().max() <= 1e-5


def test_a_sound_with_too_many_embeddings_is_refused_before_it_is_read(tmp_path):
    llm = make_llm(written("voxtral", tmp_path), max_model_len=256, encoder_cache_size=60)
    prompt = {"prompt": MARK, "multi_modal_data": {"audio": [np.zeros(100 * RATE, np.float32)]}}
    with pytest.raises(ValueError, match="an item of 1250 embeddings is more than encoder_cache_size"):
        llm.generate([prompt], PARAMS, use_tqdm=False)


def test_a_sound_that_transformers_would_cut_off_is_refused(tmp_path):
    [family] = families("glmasr")
    processor = make("glmasr", shrunk(CONFIG_MAPPING["glmasr"]()), "audio")
    write(family, build(family, processor)[0], tmp_path, processor)
    prompt = {"prompt": processor.mark, "multi_modal_data": {"audio": [np.zeros(656 * RATE, np.float32)]}}
    with pytest.raises(ValueError, match="the sound is longer than 655 s"):
        make_llm(tmp_path, max_model_len=256).generate([prompt], PARAMS, use_tqdm=False)
