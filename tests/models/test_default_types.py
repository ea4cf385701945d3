"""The types in which a model computes and stores if the options name none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.models.precision import target_of
from quire.ops.cpu import build
from support.checkpoints import write_checkpoint
from support.engines import make_llm, runner_of, teacher_forced_logits
from support.gguf_files import WIDE, write_gguf

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TEXT = [5, 60, 7, 100, 30, 2, 90, 41, 17, 8, 200, 63, 12, 5, 60, 33] * 3


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose output layer is not its embedding."""
    changes = {**WIDE, "tie_word_embeddings": False}
    return write_checkpoint(tmp_path_factory.mktemp("untied") / "checkpoint", "llama", changes, seed=3)


@pytest.fixture(scope="module")
def quantized(untied: Path) -> Path:
    return write_gguf(untied, untied.parent / "quantized.gguf", "Q4_1")


@pytest.mark.parametrize(
    ("options", "device", "dtype", "narrow"),
    [
        ({}, CPU, "float32", "float16"),
        ({"tensor_parallel_size": 2, "batch_invariant": True}, CPU, "float32", "float16"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, CPU, "float32", "float16"),
        ({}, GPU, "bfloat16", None),
        ({"dtype": "bfloat16"}, CPU, "bfloat16", None),
        ({"dtype": "float32"}, CPU, "float32", None),
        ({"kv_cache_dtype": "int8"}, CPU, "bfloat16", None),
        ({"runner": "pooling"}, CPU, "bfloat16", None),
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, CPU, "bfloat16", None),
    ],
)
def test_quantized_files_on_cpus_compute_in_float32_unless_options_name_a_type(
    quantized: Path, options: dict[str, Any], device: torch.device, dtype: str, narrow: str | None
) -> None:
    target = target_of(EngineConfig.create(model=str(quantized), **options), quantized, device)
    assert target.device == device
    assert target.dtype is getattr(torch, dtype)
    assert target.narrow is (None if narrow is None else getattr(torch, narrow))
    assert target.batch_invariant == options.get("batch_invariant", False)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_files_with_dense_weights_and_other_checkpoints_compute_in_bfloat16(untied: Path, tmp_path: Path, kind: str):
    for model in (write_gguf(untied, tmp_path / "dense.gguf", kind), untied):
        target = target_of(EngineConfig.create(model=str(model)), model, CPU)
        assert (target.dtype, target.narrow) == (torch.bfloat16, None)


def test_their_logits_are_nearer_to_those_in_float32_than_the_ones_in_bfloat16(quantized: Path) -> None:
    exact, found, rounded = (
        teacher_forced_logits(make_llm(quantized, dtype=dtype), TEXT) for dtype in ("float32", "auto", "bfloat16")
    )
    errors = [float((logits - exact).square().mean()) for logits in (found, rounded)]
    assert errors[0] < 0.8 * errors[1]
    assert (errors[0] > 0) == (build.library() is not None)  # only the kernels round the inputs of products


def test_their_keys_and_separate_embeddings_are_float16(quantized: Path) -> None:
    llm = make_llm(quantized, dtype="auto")
    assert llm.dtype == "float32"
    assert llm.llm_engine.model_config.dtype is torch.float32
    model = runner_of(llm).model
    assert {backend.layout for backend in runner_of(llm).forward.backends} == {"torch.float16"}
    assert model.embedding.table.weight.dtype is torch.float16
    assert model.embedding(torch.tensor(TEXT)).dtype is torch.float32
