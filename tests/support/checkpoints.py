"""Tiny random checkpoints in the Hugging Face layout, written by transformers itself.

transformers' own initialization (standard deviation 0.02) makes poor tests: the greedy output is one or two token ids,
and a wrong rotary base goes unnoticed. Here the weights are scaled so that attention is sharp, biases and norm weights
matter, and the output wanders through the vocabulary; `test_the_checkpoints_can_tell_right_from_wrong` checks that.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.families import NEW_VARIANTS
from support.families.base import MAX_POSITIONS, Variant, rope
from support.layouts import HUB_LAYOUTS, RENAMED, edit_config, edit_tensors, stand_in_config

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the cat sat on the mat with the hat.",
    "Once upon a time there was a small engine that could read a whole book in one night.",
    "Grüße aus Köln: naïve café, señor — 1234567890",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
EOS, END = 2, 3  # generation_config.json names both; the tokenizer's own is EOS

BASE = {
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


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# name: (model type, differences from BASE, how config.json is written:
#   old_rope writes rope_theta and rope_scaling as before transformers 5; without drops fields from the file;
#   seed: one whose greedy continuations do not run into loops)
VARIANTS: dict[str, Variant] = {
    "llama": ("llama", {"num_key_value_heads": 4}, {}),
    "llama-gqa2-tied-llama3": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": rope(500_000.0, "llama3", **_LLAMA3), "vocab_size": 333},
        {"seed": 4},
    ),
    "llama-gqa4-llama3-old": (
        "llama",
        {"num_attention_heads": 8, "rope_parameters": rope(100.0, "llama3", **_LLAMA3)},
        {"old_rope": True},
    ),
    "llama-6-heads-over-2": (
        "llama",
        {"num_attention_heads": 6, "hidden_size": 48, "head_dim": 24, "rope_parameters": rope(2_000.0)},
        {},
    ),
    "llama-mqa-linear": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 40, "rope_parameters": rope(10_000.0, "linear", factor=3.0)},
        {},
    ),
    "llama-biases-linear-old": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope(10_000.0, "linear", factor=2.0)},
        {"old_rope": True},
    ),
    "mistral-window-20": ("mistral", {"sliding_window": 20, "rope_parameters": rope(1_000_000.0)}, {"old_rope": True}),
    "mistral-window-32-tied": (
        "mistral",
        {"sliding_window": 32, "tie_word_embeddings": True, "head_dim": 24},
        {"seed": 1},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 40, "num_key_value_heads": 1}, {}),
    "qwen2": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": rope(1_000_000.0), "num_key_value_heads": 1},
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
    "qwen3": ("qwen3", {"head_dim": 32, "rope_parameters": rope(1_000_000.0)}, {}),
    "qwen3-mixed-windows-biases": (
        "qwen3",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 18,  # a block is freed in the step right after its last use
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"seed": 5},
    ),
}

ALL_VARIANTS = {**VARIANTS, **NEW_VARIANTS}
FAMILIES: dict[str, list[str]] = {}  # the variants of each model type, the usual form first
for _name, (_kind, _, _) in ALL_VARIANTS.items():
    FAMILIES.setdefault(_kind, []).append(_name)

PLAIN_DOWN = r"fc2|fc_out|mlp\.c_proj|dense_4h_to_h|ffn\.down_proj"  # of MLPs without a gate
EMBEDDINGS = r"embed_(tokens|positions|in)\.|word_embeddings|wte|wpe"


def model_class(kind: str) -> Any:
    """(config class, model class) of transformers; imported here because that takes seconds."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, Mistral4Config
    from transformers import Mistral4ForCausalLM as Mistral4

    import support.changed_attention
    import support.grouped_tokens
    import support.lightning
    import support.loops
    import support.rwkv7
    import support.stand_ins  # registers others
    import support.text_models  # noqa: F401  the same

    AutoModelForCausalLM.register(Mistral4Config, Mistral4, exist_ok=True)  # transformers' list lacks it
    config_class = type(AutoConfig.for_model(RENAMED.get(kind, kind)))
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def build(kind: str, config: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers. config: differences from the fields of BASE that the family has."""
    config_class, model = model_class(kind)
    known = {*config_class().to_dict(), *config_class.attribute_map}
    base = {name: value for name, value in BASE.items() if name in known}
    fields = deepcopy({**base, "pad_token_id": None, **stand_in_config(kind, config)})  # transformers adds to some
    network = model(config_class(**fields)).float()
    scale_weights(network, seed)
    return network.eval()


def scale_weights(model: Any, seed: int) -> None:
    """Draw all parameters at random, such that each of them affects the logits."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kind, tied = model.config.model_type, model.config.tie_word_embeddings
    drawn = ("e_score_correction_bias", "expert_bias", "layer_scalar")
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(drawn)]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                noise = 1.5 * noise - 1.5  # some states are forgotten soon, others live for many tokens
            elif name.endswith("bias"):
                noise *= bias_size(name)
            elif name.endswith("sinks"):
                noise = 4 + 2 * noise  # among the largest of the scores
            elif re.search(r"norm|ln_|scale$|scalar$", name):
                noise = norm_size(name, kind) * (1 + 0.3 * noise)
                if kind in ("gemma", "gemma2", "gemma3_text"):
                    noise -= 1  # its norms multiply by 1 + weight
            elif tied or not re.search(EMBEDDINGS, name):
                transposed = kind == "gpt2" and ".h." in name
                transposed |= kind in ("gpt_oss", "llama4_text") and ".experts." in name
                inputs = -2 if transposed else -1
                if re.search(PLAIN_DOWN, name):
                    noise -= noise.mean(inputs, keepdim=True)  # else the mean of GELU, which is not 0, dominates
                noise *= gain(name, kind) / parameter.shape[inputs] ** 0.5
            parameter.copy_(noise)


def bias_size(name: str) -> float:
    if "router" in name:
        return 1
    return 0.1 if re.search(r"norm|ln_|fc[12]|fc_(in|out)|dense|c_proj|c_fc|out_proj", name) else 0.3


def norm_size(name: str, kind: str) -> float:
    if re.search(r"([qk]|query|key)_(layer)?norm", name) and kind != "gemma4_text":  # whose scores are not scaled down
        return 2  # sharp attention
    if kind.startswith("gemma") and name == "model.norm.weight":
        return 3  # for the small embeddings
    if kind in ("gemma2", "gemma3_text") and "post_" in name:
        return 2
    return 1


def gain(name: str, kind: str) -> float:
    """The size of a weight's outputs if its inputs have size 1."""
    if re.search(rf"{PLAIN_DOWN}|fc1|fc_in|c_fc|h_to_4h|ffn\.up_proj", name):
        return 2.5
    if kind.startswith("gemma") and re.search(EMBEDDINGS, name):
        return 0.6  # before they are multiplied by the root of hidden_size
    if re.search(r"embed_positions|wpe", name):
        return 4.0
    if "project_in" in name:
        return 4.0  # its inputs are tied embeddings, which are small
    if re.search(rf"lm_head|embed_out|attn|attention|{EMBEDDINGS}", name):
        return 2.0
    return 1.2


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
    hub_layout: bool = False,
    old_rope: bool = False,
    without: list[str] | None = None,
    adds: dict[str, Any] | None = None,
    dtype: str = "float32",
    network: Any = None,
    **save_options: Any,
) -> Path:
    """A whole checkpoint: config, weights, tokenizer, generation_config.

    network: a changed model from `build`, by default a new one. hub_layout: use the tensor names of the family's first
    checkpoints. save_options: of save_pretrained.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    network = (build(kind, config or {}, seed) if network is None else network).to(getattr(torch, dtype))
    network.config.dtype = getattr(torch, dtype)
    network.generation_config.eos_token_id = [EOS, END]
    network.save_pretrained(directory, **save_options)
    edit_config(directory, kind, config or {}, old_rope=old_rope, without=without or [], adds=adds or {})
    if hub_layout:
        edit_tensors(directory, HUB_LAYOUTS[kind])
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return directory


class Checkpoints:
    """The variants on disk. Each is written when it is first requested."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._paths: dict[str, Path] = {}

    def path(self, variant: str) -> Path:
        """The directory of a variant. Read only: copy it to change it."""
        if variant not in self._paths:
            kind, config, writing = ALL_VARIANTS[variant]
            self._paths[variant] = write_checkpoint(self._factory.mktemp(variant), kind, config, **writing)
        return self._paths[variant]
