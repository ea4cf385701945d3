"""Tiny models that hear, with Quire's preprocessing, and what transformers says about sounds.

Their encoders' inputs are computed here as transformers' processors do, without the packages that these need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import byte_level_tokenizer
from support.every_family import draw_weights, families, judge, write
from support.hearing import sound
from support.tiny_configs import FIRST_MARK, shrunk

Samples = npt.NDArray[np.float32]
Inputs = dict[str, Any]
RATE = 16_000


def _voxtral(config: Any, sounds: list[Samples]) -> tuple[Inputs, list[int]]:
    """The encoder's inputs for sounds, and the number of embeddings of each."""
    from transformers import WhisperFeatureExtractor

    audio = config.audio_config
    seconds = audio.max_source_positions // 50
    extractor = WhisperFeatureExtractor(feature_size=audio.num_mel_bins, chunk_length=seconds)
    made = []
    for samples in sounds:
        found = extractor(samples, sampling_rate=RATE, truncation=False, padding=True,
                          pad_to_multiple_of=seconds * RATE, return_tensors="pt").input_features  # fmt: skip
        made.append(found.reshape(audio.num_mel_bins, -1, 100 * seconds).transpose(0, 1))
    stacked = audio.intermediate_size // audio.hidden_size
    counts = [len(features) * audio.max_source_positions // stacked for features in made]
    return {"input_features": torch.cat(made)}, counts


def _granite_speech(config: Any, sounds: list[Samples]) -> tuple[Inputs, list[int]]:
    """All sounds must have the same length."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    bins = config.encoder_config.input_dim // 2
    filters = mel_filter_bank(257, bins, 0, RATE / 2, RATE, norm=None, mel_scale="htk")
    window = window_function(400, "hann")
    features = []
    counts = []
    levels = {"mel_filters": filters, "mel_floor": 1e-10, "log_mel": "log10"}
    for samples in sounds:
        mel = spectrogram(samples, window, 400, 160, 512, power=2.0, **levels)
        scaled = np.maximum(mel, mel.max() - 8) / 4 + 1
        pairs = scaled.shape[1] // 2
        features.append(torch.tensor(scaled[:, : 2 * pairs].T.reshape(pairs, -1), dtype=torch.float32))
        counts.append(-(-pairs // config.window_size) * (config.window_size // config.downsample_rate))
    mask = torch.ones(len(sounds), counts[0], dtype=torch.bool)
    return {"input_features": torch.stack(features), "input_features_mask": mask}, counts


def _qwen3_asr(config: Any, sounds: list[Samples]) -> tuple[Inputs, list[int]]:
    from transformers import Qwen3ASRFeatureExtractor

    bins = config.audio_config.num_mel_bins
    extractor = Qwen3ASRFeatureExtractor(feature_size=bins, n_window=config.audio_config.n_window)
    made = extractor(sounds, sampling_rate=RATE, padding=True, return_attention_mask=True, return_tensors="pt")
    lengths = made["attention_mask"].sum(-1)
    rest = lengths % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    inputs = {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}
    return inputs, (rest + lengths // 100 * 13).tolist()


def _as_published(folder: Path) -> None:
    """Turn a checkpoint of Qwen3-ASR into the format of its authors, in which a part of the config is the model."""
    config = json.loads((folder / "config.json").read_text())
    top = {name: config.pop(name) for name in ("architectures", "model_type")}
    config["text_config"]["rope_scaling"] = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "type": "default"}
    (folder / "config.json").write_text(json.dumps({**top, "thinker_config": config}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, new in (
            (r"^model\.multi_modal_projector\.linear_", "audio_tower.proj"),
            (r"^model\.audio_tower\.", "audio_tower."),
            (r"^model\.language_model\.", "model."),
        ):
            name = re.sub(pattern, new, name)
        renamed[f"thinker.{name}"] = tensor
    save_file(renamed, folder / "model.safetensors")


@dataclass(frozen=True)
class Hearing:
    """A family: changes of its tiny config, a function above for its inputs, and one that changes the checkpoint."""

    changes: dict[str, Any]
    inputs: Callable[[Any, list[Samples]], tuple[Inputs, list[int]]]
    edit: Callable[[Path], None] = lambda folder: None


FAMILIES = {
    "voxtral": Hearing(
        {"audio_token_id": FIRST_MARK, "audio_config": {"intermediate_size": 256, "max_source_positions": 100}},
        _voxtral,
    ),
    "granite_speech": Hearing({"audio_token_index": FIRST_MARK, "has_lora_adapter": False}, _granite_speech),
    "granite_speech_plus": Hearing({"audio_token_index": FIRST_MARK, "has_lora_adapter": False}, _granite_speech),
    "qwen3_asr": Hearing({"audio_token_id": FIRST_MARK}, _qwen3_asr, _as_published),
}
ARCHITECTURES = {
    "VoxtralForConditionalGeneration": "voxtral",
    "GraniteSpeechForConditionalGeneration": "granite_speech",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech_plus",
}
CLASSIFIERS = ["Qwen3ASRForcedAlignerForTokenClassification"]
MARK = "<sound>"
PROMPTS: list[tuple[str, list[tuple[int, float]]]] = [
    (f"Hear: {MARK} What is it?", [(1, 1.5)]),
    (f"{MARK} and {MARK}: which is it?", [(2, 0.7), (3, 0.7)]),
    ("A text without any sounds, which is a little longer than the others are.", []),
    (f"The same again: {MARK} then {MARK}.", [(1, 1.5), (1, 1.5)]),
    (f"A long one: {MARK}", [(4, 3.3)]),
]


@cache
def network_of(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    [family] = families(model_type)
    fields = shrunk(CONFIG_MAPPING[model_type]())
    for name, value in FAMILIES[model_type].changes.items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) else value
    import transformers

    torch.manual_seed(0)
    network = getattr(transformers, family.model_class)(CONFIG_MAPPING[model_type](**fields)).float().eval()
    draw_weights(network)
    return network


def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(byte_level_tokenizer().to_str())
    made.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
    assert made.token_to_id(MARK) == FIRST_MARK
    return made


def written(model_type: str, folder: Path) -> Path:
    [family] = families(model_type)
    write(family, network_of(model_type), folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    FAMILIES[model_type].edit(folder)
    return folder


def aligner(folder: Path) -> Path:
    """Qwen3-ASR as a forced aligner: its head makes the scores of times for each token."""
    written("qwen3_asr", folder)
    tensors = load_file(folder / "model.safetensors")
    head = network_of("qwen3_asr").get_output_embeddings().weight.detach().clone()
    save_file({**tensors, "thinker.lm_head.weight": head}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["classify_num"] = len(head)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": CLASSIFIERS}))
    return folder


def sounds_of(numbers: list[tuple[int, float]]) -> list[Samples]:
    return [sound(number, seconds) for number, seconds in numbers]


def expected_prompt(model_type: str, text: str, sounds: list[Samples]) -> tuple[list[int], Inputs]:
    """The tokens of a prompt, and the encoder's inputs."""
    inputs, counts = FAMILIES[model_type].inputs(network_of(model_type).config, sounds) if sounds else ({}, [])
    for count in counts:
        text = text.replace(MARK, "\0" * count, 1)
    return tokenizer().encode(text.replace("\0", MARK), add_special_tokens=False).ids, inputs


def judged(model_type: str, prompt: list[int], inputs: Inputs, token_ids: list[int]) -> tuple[int, int]:
    """How many tokens are wrong, and how many could have been others."""
    marks = [index for index, token_id in enumerate(token_ids) if token_id == FIRST_MARK]
    kept = token_ids[: marks[0]] if marks else token_ids  # to transformers, one is a sound
    return judge(network_of(model_type), prompt, kept, inputs)
