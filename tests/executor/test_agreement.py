"""What machines compare before they work together."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.executor.agreement import facts, versions, weights_digest
from support.faults import Faults


def of(path: Path, **options: Any) -> dict[str, str]:
    return facts(EngineConfig.create(model=str(path), **options), path)


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.fixture
def copy(checkpoints, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints.path("llama"), tmp_path / "copy"))


def test_copies_of_a_model_agree_wherever_they_are(checkpoints, copy):
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert of(checkpoints.path("llama")) == of(copy)


def test_a_byte_of_the_weights_makes_a_difference(checkpoints, copy):
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert differences(of(checkpoints.path("llama")), of(copy)) == {"the model's weights"}


def test_a_value_in_config_json_is_named(checkpoints, copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
    assert "rope_theta in the model's config.json" in differences(of(checkpoints.path("llama")), of(copy))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"max_model_len": 99},
        {"tensor_parallel_size": 2},
        {"quantization": "int8"},
        {"kernels": {"rms_norm": "reference"}},
        {"logits_processors": [Faults]},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
)
def test_options_must_be_the_same(checkpoints, options):
    path = checkpoints.path("llama")
    assert differences(of(path), of(path, **options)) == set(options)


def test_options_of_a_machine_may_differ(checkpoints):
    path = checkpoints.path("llama")
    own = of(path, kv_cache_memory_bytes="1G", master_port=5, cluster_secret_file="x", download_dir="/y")
    assert differences(of(path), own) == set()


def test_large_weights_are_not_read_whole(tmp_path: Path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file, which would take minutes
    empty = weights_digest(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek((1 << 40) - 4)
        file.write(b"tail")
    assert weights_digest(tmp_path) != empty


def test_versions_are_those_of_the_installed_packages():
    assert versions()["torch"].startswith("2.")
