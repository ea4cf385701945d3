"""A small model and its footprint, for simulations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import spec_of
from quire.planner.sizes import Footprint, parameters_of

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "norm_topk_prob": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
WINDOWS = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 100}


def footprint(config: dict[str, Any]) -> Footprint:
    """In bfloat16."""
    spec = spec_of(config)
    return Footprint(spec, parameters_of(spec), 2, 2, 2, is_dense=True)


@pytest.fixture(scope="session")
def llama() -> Footprint:
    return footprint(LLAMA_8B)


@pytest.fixture(scope="session")
def mixture() -> Footprint:
    return footprint(MIXTURE)


@pytest.fixture(scope="session")
def windows() -> Footprint:
    return footprint(WINDOWS)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the config of a model."""
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder
