"""A tiny Whisper with random weights, sounds, and what transformers says about them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from support.checkpoints import EOS
from support.reference import Continuation
from support.seeing import FIRST, TEXT, TIE, tokenizer

RATE = 16_000
SECONDS = 2  # that the model hears at once
POSITIONS = 50 * SECONDS
TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{i / 50:.2f}|>" for i in range(POSITIONS + 1))
EOT, SOT, EN, DE, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMES = range(FIRST, FIRST + len(TOKENS))
ZERO = NO_TIMES + 1  # <|0.00|>
VOCABULARY = ZERO + len(TIMES)
NUM_TOKENS = 24
GENERATION = {
    "eos_token_id": EOT,
    "decoder_start_token_id": SOT,
    "pad_token_id": EOT,
    "no_timestamps_token_id": NO_TIMES,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "max_initial_timestamp_index": 20,
    "suppress_tokens": [5, 6, 50, 60, 61, SOT, TRANSLATE, TRANSCRIBE, 306, PREVIOUS, NO_SPEECH],
    "begin_suppress_tokens": [7, 40, EOT],
    "max_length": 128,
}


def sound(number: int, seconds: float = 1.5, rate: int = RATE) -> npt.NDArray[np.float32]:
    """Some gliding tones with noise, different for each number."""
    draw = np.random.default_rng(number)
    times = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * (f + g * times) * times) for f, g in draw.uniform(100, 2000, (3, 2)))
    return (tones * 0.2 + draw.normal(0, 0.02, len(times))).astype(np.float32)


def model() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(3)
    network = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=20,
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_layers=3,
            decoder_attention_heads=4,
            decoder_ffn_dim=96,
            init_std=0.3,
            max_source_positions=POSITIONS,
            max_target_positions=128,
            pad_token_id=EOT,
            bos_token_id=EOT,
            eos_token_id=EOT,
            decoder_start_token_id=SOT,
        )
    )
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.2)
            elif "decoder" in name and "out_proj" in name:
                tensor.mul_(3)
            elif "embed_tokens" in name:
                tensor.mul_(0.3)
    return network.eval()


def extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)


@cache
def written(folder: Path) -> Path:
    """A checkpoint of the model below the folder."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory, network = folder / "whisper", model()
    network.generation_config = GenerationConfig(**GENERATION)
    network.save_pretrained(directory)
    extractor().save_pretrained(directory)
    made = tokenizer(TOKENS)
    made.add_tokens(list(TIMES))
    made.eos_token = "<|endoftext|>"
    made.save_pretrained(directory)
    assert json.loads((directory / "generation_config.json").read_text())["suppress_tokens"]
    return directory


@cache
def network(folder: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(
        written(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def continuation(folder: Path, samples: npt.NDArray[np.float32], prompt: list[int]) -> Continuation:
    """What transformers says: its model, and its rules for the output."""
    return continuation_of(network(folder), samples, prompt)


@torch.inference_mode()
def continuation_of(whisper: Any, samples: npt.NDArray[np.float32], prompt: list[int]) -> Continuation:
    """What a model of transformers says with these rules."""
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    begin = len(prompt)
    rules = LogitsProcessorList(
        [
            SuppressTokensLogitsProcessor(GENERATION["suppress_tokens"]),
            SuppressTokensAtBeginLogitsProcessor(GENERATION["begin_suppress_tokens"], begin),
        ]
    )
    if prompt[-1] != NO_TIMES:
        rules.append(WhisperTimeStampLogitsProcessor(GenerationConfig(**GENERATION), begin))
    features = extractor()(samples, sampling_rate=RATE, return_tensors="pt").input_features
    encoded, tokens, certain = whisper.model.encoder(features), torch.tensor([prompt]), NUM_TOKENS
    for count in range(NUM_TOKENS):
        logits = whisper(encoder_outputs=encoded, decoder_input_ids=tokens).logits[:, -1]
        scores = rules(tokens, logits)
        best = scores[0].topk(2).values
        if best[0] - best[1] < TIE:
            certain = min(certain, count)
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
    return Continuation(prompt, tokens[0, begin:].tolist(), certain)


CHAT_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
MARK = "<|audio_bos|><|AUDIO|><|audio_eos|>"
CHAT_PROMPTS = [
    (f"Hear: {MARK} What is it?", [(1, 1.5)]),
    (f"{MARK} and {MARK}: which is it?", [(2, 0.5), (3, SECONDS)]),
    ("A text without any sounds, which is a little longer than the others are.", []),
    (f"The same again: {MARK} then {MARK}.", [(1, 1.5), (1, 1.5)]),
]


def chat_model() -> Any:
    """A tiny Qwen2-Audio."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2Config
    from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig

    torch.manual_seed(5)
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=20,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        d_model=64,
        max_source_positions=POSITIONS,
        initializer_range=0.3,
    )
    config = Qwen2AudioConfig(audio_config=audio, text_config=Qwen2Config(**TEXT), audio_token_index=FIRST)
    network = Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if "audio_tower" in name and tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    return network.eval()


@cache
def chat_written(folder: Path) -> tuple[Path, list[tuple[str, list[npt.NDArray[np.float32]], Continuation]]]:
    """A checkpoint of the model, and what transformers says: the text, its sounds, and how it goes on."""
    from transformers import Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor

    directory = folder / "qwen2_audio"
    chat_model().save_pretrained(directory)
    made = tokenizer(CHAT_TOKENS)
    processor = Qwen2AudioProcessor(extractor(), made, audio_token="<|AUDIO|>")
    processor.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    network = Qwen2AudioForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for text, numbers in CHAT_PROMPTS:
        sounds = [sound(number, seconds) for number, seconds in numbers]
        inputs = processor(text=[text], audio=sounds or None, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            output = network.generate(
                **inputs,
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        best = torch.stack(output.logits)[:, 0].topk(2, dim=-1).values
        ties = (best[:, 0] - best[:, 1] < TIE).tolist()
        certain = ties.index(True) if any(ties) else NUM_TOKENS
        found.append((text, sounds, Continuation(prompt, output.sequences[0, len(prompt) :].tolist(), certain)))
    return directory, found
