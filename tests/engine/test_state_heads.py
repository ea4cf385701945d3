"""Medusa heads from a checkpoint on disk, behind a whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError

HEADS, PROMPTS = 3, ["Tom has a cat. The cat likes", "Once there was a"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads as FasterDecoding publishes them, whose config says two."""
    target = json.loads((bundled_model() / "config.json").read_text())
    path, size, vocab = tmp_path_factory.mktemp("medusa"), target["hidden_size"], target["vocab_size"]
    torch.manual_seed(0)
    tensors = {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"] = torch.randn(size, size) / size
        tensors[f"{head}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, size) / size**0.5
    save_file(tensors, path / "medusa_lm_head.safetensors")
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [None, HEADS])
def test_heads_draft_as_many_tokens_as_the_user_or_their_config_says(heads: Path, number: int | None):
    config = {"model": str(heads), "adaptive": False, "num_speculative_tokens": number}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = LLM(dtype="float32").generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(dtype="float32", speculative_config=config)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.outputs[0].text for output in found] == [output.outputs[0].text for output in expected]
    for output in found:
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics is not None
        assert metrics.num_spec_tokens == (number or 2)
        assert max(metrics.counts) == (number or 2)


def test_more_drafts_than_heads_are_an_error_that_says_how_many_there_are(heads: Path):
    with pytest.raises(ConfigError, match=f"num_speculative_tokens is 5, but .* medusa makes {HEADS} drafts at most"):
        LLM(dtype="float32", speculative_config={"model": str(heads), "num_speculative_tokens": 5})
