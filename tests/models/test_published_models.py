"""The tensors of published checkpoints are those that Quire's families expect, at their real sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.checkpoints.index import known_tensors
from quire.config.engine import ModelConfig
from quire.models.description import describe
from quire.models.fit import fit_of
from support.published import full_names, published

MODELS = published()


@pytest.mark.parametrize("name", MODELS)
def test_the_published_names_fit(tmp_path: Path, name: str):
    names = full_names(MODELS[name]["tensors"])
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = known_tensors(tmp_path)
    assert tensors is not None
    fit = fit_of(describe(tmp_path, ModelConfig()), tensors)
    assert fit.is_complete
    assert fit.count == len(names)
