"""Whisper against transformers: embeddings of the encoder, and the same greedy tokens however the work is cut up.

The prompts have timestamps and none, a text before them and none, and the same sound twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from quire.kv.specs import CrossAttentionSpec
from quire.messages.sampling_params import SamplingParams
from quire.multimodal.families.whisper import Sounds
from quire.multimodal.mel import log_mel, mel_filters
from quire.multimodal.preprocessing import read_settings
from support.encoder_ways import WAYS, Encoded, check_cross_blocks
from support.engines import generate, make_llm, runner_of
from support.hearing import (
    DE,
    EN,
    NO_TIMES,
    NUM_TOKENS,
    POSITIONS,
    PREVIOUS,
    RATE,
    SECONDS,
    SOT,
    TRANSCRIBE,
    TRANSLATE,
    continuation,
    extractor,
    network,
    sound,
    written,
)

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BEFORE = [PREVIOUS, *range(20, 60)]
PROMPTS = [
    (0, [SOT, EN, TRANSCRIBE, NO_TIMES]),
    (1, [SOT, DE, TRANSLATE]),
    (2, [*BEFORE, SOT, EN, TRANSCRIBE, NO_TIMES]),
    (0, [*BEFORE, SOT, EN, TRANSCRIBE]),
    (3, [SOT, EN, TRANSCRIBE]),
]


@pytest.fixture(scope="module")
def expected(folder) -> list[Any]:
    return [(sound(number), continuation(folder, sound(number), prompt)) for number, prompt in PROMPTS]


def check(llm: LLM, expected: list[Any]) -> None:
    prompts = [{"prompt_token_ids": c.prompt, "multi_modal_data": {"audio": (s, RATE)}} for s, c in expected]
    for (_, wanted), output in zip(expected, generate(llm, prompts, PARAMS), strict=True):
        wanted.check(output.outputs[0].token_ids)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_greedy_tokens_equal_transformers(folder, expected, way):
    def make(backend: str = "cpu", **options: Any) -> LLM:
        return make_llm(written(folder), backend, **{"max_model_len": 128, "max_num_seqs": 8, **options})

    way(Encoded(make, check, expected, POSITIONS, few_blocks=40))


def test_the_encoders_embeddings_equal_transformers(folder):
    llm = make_llm(written(folder), max_model_len=128)
    features = extractor()(sound(1), sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        wanted = network(folder).model.encoder(features).last_hidden_state[0]
        made = runner_of(llm).media.tower("audio", {"mel": features[0]})
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("bins", "seconds"), [(20, SECONDS), (80, 30), (128, 30)])
def test_spectra_have_the_values_of_transformers(tmp_path, bins, seconds):
    from transformers import WhisperFeatureExtractor

    made = WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)
    made.save_pretrained(tmp_path)
    assert np.abs(mel_filters(400, bins, RATE) - made.mel_filters).max() < 1e-15
    settings = read_settings(tmp_path)
    family = Sounds({"max_source_positions": 50 * seconds, "num_mel_bins": bins}, settings, str)
    for samples in (sound(1, seconds), sound(2, seconds / 3), np.zeros(2000, np.float32)):
        whole = np.zeros(seconds * RATE, np.float32)
        whole[: len(samples)] = samples
        ours = family.audio(samples).tensors["mel"]
        # numpy's path of the extractor computes in float64, as here; torch's in float32
        exact = made._np_extract_fbank_features(whole[None], "cpu")[0].astype(np.float32)
        assert np.abs(ours - exact).max() <= 1e-6
        assert np.abs(ours - made(samples, sampling_rate=RATE)["input_features"][0]).max() < 1e-3
    assert log_mel(np.zeros(RATE, np.float32), mel_filters(400, bins, RATE), 400, 160).shape == (bins, 100)


def test_blocks_of_cross_attention_are_allocated_once_and_freed(folder):
    llm = make_llm(written(folder), max_model_len=128)
    kv, blocks = llm.core.scheduler.kv, -(-POSITIONS // 16)
    [spec] = [spec for spec in kv.specs if isinstance(spec, CrossAttentionSpec)]
    assert kv.max_blocks(128) == blocks + 8
    prompt = {"prompt_token_ids": PROMPTS[0][1], "multi_modal_data": {"audio": (sound(1), RATE)}}
    check_cross_blocks(llm, prompt, PARAMS, blocks)
    assert spec.entries[0].role == "cross"


def test_a_text_of_special_tokens_and_a_sound_at_another_rate_can_be_given(folder, expected):
    llm = make_llm(written(folder), max_model_len=128)
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    samples, wanted = expected[0]
    [output] = generate(llm, [{"prompt": text, "multi_modal_data": {"audio": samples}}], PARAMS)
    assert output.prompt_token_ids == wanted.prompt
    wanted.check(output.outputs[0].token_ids)
    slow = sound(0, rate=8_000)
    pair = np.stack([slow, slow])
    for given in ((slow, 8_000), [(pair, 8_000)]):
        [output] = generate(llm, [{"prompt": text, "multi_modal_data": {"audio": given}}], PARAMS)
        assert len(output.outputs[0].token_ids) == NUM_TOKENS


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt_token_ids": [SOT]}, "needs a sound"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": []}}, "takes one item of audio"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": [sound(1), sound(2)]}}, "takes one item of audio"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"image": sound(1)}}, "takes no image"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": (sound(1, SECONDS + 1), RATE)}}, "longer than 2 s"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": (sound(1), 1)}}, "samples a second"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": (sound(1), "x")}}, "must be a number"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": np.zeros(9, int)}}, "array of floats"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": "x"}}, "array of floats"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": np.zeros(0)}}, "no samples"),
        ({"prompt_token_ids": [SOT], "multi_modal_data": {"audio": np.array([np.nan])}}, "not finite"),
    ],
)
def test_what_cannot_be_heard_is_refused(folder, prompt, reason):
    llm = make_llm(written(folder), max_model_len=128)
    with pytest.raises(ValueError, match=reason):
        llm.generate([prompt], PARAMS, use_tqdm=False)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "value"),
    [("decode_context_parallel_size", 2), pytest.param("pipeline_parallel_size", 2, marks=pytest.mark.slow)],
)
def test_options_that_do_not_fit_are_refused(folder, name, value):
    with pytest.raises(ConfigError, match=name):
        LLM(str(written(folder)), dtype="float32", **{name: value})
