"""The fingerprint of KV blocks: equal for equal settings in any process, different where blocks may differ."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.checkpoints.hub import bundled_model
from quire.config.engine import EngineConfig
from quire.engine.fingerprint import cache_fingerprint

SCRIPT = """
import sys
from pathlib import Path
from quire.config.engine import EngineConfig
from quire.engine.fingerprint import cache_fingerprint
print(cache_fingerprint(EngineConfig.create(model=sys.argv[1]), Path(sys.argv[1]), "cpu, bfloat16"))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, so that its files may be changed."""
    return Path(shutil.copytree(bundled_model(), tmp_path / "model"))


def fingerprint(model: Path, layout: str = "cpu, bfloat16", **options: object) -> str:
    return cache_fingerprint(EngineConfig.create(model=str(model), **options), model, layout)


def drafting(model: Path) -> dict[str, object]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}


def test_another_process_computes_the_same_fingerprint(model: Path) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == fingerprint(model)


def test_whatever_changes_the_content_of_blocks_changes_the_fingerprint(model: Path) -> None:
    weights = next(model.glob("*.safetensors"))
    other = Path(shutil.copytree(model, model.parent / "other"))
    known = [
        fingerprint(model),
        fingerprint(other),
        fingerprint(model, layout="cpu, float32"),
        fingerprint(model, block_size=32),
        fingerprint(model, quantization="int8"),
        fingerprint(model, load_format="dummy"),
        fingerprint(model, tensor_parallel_size=2),
        fingerprint(model, hf_overrides={"rope_theta": 5.0}),
        fingerprint(model, speculative_config=drafting(model)),
        fingerprint(model, speculative_config=drafting(other)),
    ]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert len({*known, fingerprint(model)}) == len(known) + 1


def test_what_does_not_change_blocks_leaves_the_fingerprint(model: Path) -> None:
    assert fingerprint(model, speculative_config={"method": "suffix"}) == fingerprint(model)
    assert fingerprint(model, max_num_seqs=3, seed=7) == fingerprint(model)


def test_a_model_of_the_hub_is_known_by_its_commit_wherever_it_lies(model: Path) -> None:
    places = []
    for cache, commit in (("a", "c0ffee"), ("b", "c0ffee"), ("b", "beef")):
        place = model.parent / cache / "models--owner--name" / "snapshots" / commit
        places.append(Path(shutil.copytree(model, place)))
    first, second, third = map(fingerprint, places)
    assert first == second != third
