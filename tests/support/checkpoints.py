"""Tiny random checkpoints in the Hugging Face layout, written by transformers itself.

transformers' own initialization (standard deviation 0.02) makes poor tests: the greedy output is one or two token ids,
and a wrong rotary base goes unnoticed. Here the weights are scaled so that attention is sharp, biases and norm weights
matter, and the output wanders through the vocabulary; `test_the_checkpoints_can_tell_right_from_wrong` checks that.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the cat sat on the mat with the hat.",
    "Once upon a time there was a small engine that could read a whole book in one night.",
    "Grüße aus Köln: naïve café, señor — 1234567890",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
EOS, END = 2, 3  # generation_config.json names both; the tokenizer's own is EOS
MAX_POSITIONS = 256

_BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": kind, **more}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# name: (model type, differences from _BASE, how config.json is written:
#   old_rope writes rope_theta and rope_scaling as before transformers 5; without drops fields from the file;
#   seed: one whose greedy continuations do not run into loops)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4}, {}),
    "llama-gqa2-tied-llama3": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": _rope(500_000.0, "llama3", **_LLAMA3), "vocab_size": 333},
        {"seed": 4},
    ),
    "llama-gqa4-llama3-old": (
        "llama",
        {"num_attention_heads": 8, "rope_parameters": _rope(100.0, "llama3", **_LLAMA3)},
        {"old_rope": True},
    ),
    "llama-6-heads-over-2": (
        "llama",
        {"num_attention_heads": 6, "hidden_size": 48, "head_dim": 24, "rope_parameters": _rope(2_000.0)},
        {},
    ),
    "llama-mqa-linear": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 40, "rope_parameters": _rope(10_000.0, "linear", factor=3.0)},
        {},
    ),
    "llama-biases-linear-old": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": _rope(10_000.0, "linear", factor=2.0)},
        {"old_rope": True},
    ),
    "mistral-window-20": ("mistral", {"sliding_window": 20, "rope_parameters": _rope(1_000_000.0)}, {"old_rope": True}),
    "mistral-window-32-tied": (
        "mistral",
        {"sliding_window": 32, "tie_word_embeddings": True, "head_dim": 24},
        {"seed": 1},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 40, "num_key_value_heads": 1}, {}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": _rope(1_000_000.0), "num_key_value_heads": 1},
        {"old_rope": True, "without": ["layer_types"], "seed": 2},
    ),
    "qwen2-windows-in-upper-layers": (
        "qwen2",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
        {},
    ),
    "qwen2-windows-old": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "vocab_size": 401},
        {"old_rope": True, "without": ["layer_types"]},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": _rope(1_000_000.0)}, {}),
    "qwen3-mixed-windows-biases": (
        "qwen3",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 18,  # a block is let go in the very step after its last use
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"seed": 5},
    ),
}


def model_class(kind: str) -> Any:
    """(config class, model class) of transformers; imported here because that takes seconds."""
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")


def scale_weights(model: Any, seed: int) -> None:
    """Draw every parameter so that each of them shows in the logits."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, tied = model.config.hidden_size, model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                noise *= 0.3
            elif "norm" in name:
                noise = (2 if "q_norm" in name or "k_norm" in name else 1) * (1 + 0.3 * noise)
            elif "lm_head" in name or ("embed" in name and tied):
                noise *= 2 / hidden**0.5
            elif "embed" not in name:
                gain = 2.0 if "self_attn" in name else 1.2
                noise *= gain / parameter.shape[1] ** 0.5
            parameter.copy_(noise)


@cache
def byte_level_tokenizer() -> Any:
    """A BPE over bytes with a few merges: 4 special tokens, 256 bytes, 40 merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 4, BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def write_checkpoint(
    directory: Path,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    old_rope: bool = False,
    without: list[str] | None = None,
    dtype: str = "float32",
    **save_options: Any,
) -> Path:
    """A whole checkpoint: config, weights, tokenizer, generation_config. save_options: of save_pretrained."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    config_class, model = model_class(kind)
    network = model(config_class(**{**_BASE, **(config or {})})).float()
    scale_weights(network, seed)
    network.to(getattr(torch, dtype))
    network.config.dtype = getattr(torch, dtype)
    network.generation_config.eos_token_id = [EOS, END]
    network.save_pretrained(directory, **save_options)
    edit_config(directory, old_rope, without or [])
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


def edit_config(directory: Path, old_rope: bool, without: list[str]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert "rope_parameters" in config
    if old_rope:
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        if parameters["rope_type"] == "linear":
            parameters["type"] = parameters.pop("rope_type")  # older still
        if set(parameters) != {"rope_type"}:
            config["rope_scaling"] = parameters
    for name in without:
        del config[name]
    path.write_text(json.dumps(config, indent=2))


class Checkpoints:
    """The variants on disk, each written when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._paths: dict[str, Path] = {}

    def path(self, variant: str) -> Path:
        """The directory of a variant. Read only: copy it to change it."""
        if variant not in self._paths:
            kind, config, writing = VARIANTS[variant]
            self._paths[variant] = write_checkpoint(self._factory.mktemp(variant), kind, config, **writing)
        return self._paths[variant]
