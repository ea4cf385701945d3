"""A real Whisper transcribes speech, word by word as transformers does."""

from __future__ import annotations

import pytest
import torch

from quire.messages.sampling_params import SamplingParams
from quire.multimodal.sounds import decode_sound
from support.engines import make_llm
from support.real_whisper import SENTENCES, checkpoint, spoken, word_errors

START, NO_TIMES = 50257, 50362
VOICES = ("en-us", "en-gb")


@pytest.mark.nightly
def test_words_are_those_of_transformers(tmp_path):
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    path = checkpoint(tmp_path)
    llm = make_llm(path, max_model_len=448, max_num_seqs=8)
    speech = llm.processor.media.speech
    said = [(text, spoken(text, voice, tmp_path / "a.wav")) for text in SENTENCES for voice in VOICES]
    sounds = [decode_sound(data, speech.sample_rate) for _, data in said]
    whisper = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    features = WhisperFeatureExtractor()(sounds, sampling_rate=16_000, return_tensors="pt").input_features
    for with_times in (False, True):
        prompt = speech.prompt([START], "transcribe", None, with_times)
        assert prompt == [START, NO_TIMES][: 2 - with_times]
        prompts = [{"prompt_token_ids": prompt, "multi_modal_data": {"audio": [sound]}} for sound in sounds]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
        ours = [speech.text(output.outputs[0].token_ids) for output in outputs]
        with torch.inference_mode():
            theirs = [
                llm.frontend.tokenizer.decode([t for t in row.tolist() if t < 50256])
                for feature in features
                for row in whisper.generate(feature[None], return_timestamps=with_times, do_sample=False)
            ]
        errors = {
            name: [word_errors(t, text) for t, (text, _) in zip(made, said, strict=True)]
            for name, made in (("ours", ours), ("theirs", theirs))
        }
        rates = {name: sum(wrong for wrong, _ in e) / sum(count for _, count in e) for name, e in errors.items()}
        print(rates)
        assert [text.strip() for text in ours] == [text.strip() for text in theirs]
        assert rates["ours"] == rates["theirs"] < 0.4  # espeak is hard to understand
