"""benchmarks/divergence.py: the arithmetic, and Quire in float32 beside a reference that is the same."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.checkpoints.hub import bundled_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import divergence

sys.path.insert(0, str(Path(divergence.__file__).parent / "peers"))
import distances


def test_divergences_are_those_of_torch_and_add_up_over_windows():
    generator = np.random.default_rng(0)
    reference = generator.normal(size=(6, 50)).astype(np.float32)
    found = reference + generator.normal(size=reference.shape).astype(np.float32) / 4
    following = generator.integers(0, 50, 6).tolist()
    measured = distances.Distances(reference)
    measured.add(found[:4], following[:4])
    measured.add(np.pad(found[4:], ((0, 0), (0, 3)), constant_values=9), following[4:])  # a padded vocabulary
    p, q = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (reference, found))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert measured.divergences == pytest.approx(expected.tolist())
    summary = measured.summary()
    assert summary["mean"] == pytest.approx(float(expected.mean()))
    assert summary["maximum"] == pytest.approx(float(expected.max()))
    assert summary["top1"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert summary["perplexity"] == pytest.approx(float((-q[range(6), following].mean()).exp()))


def test_windows_score_as_many_tokens_of_each_text():
    windows = divergence.windows_of([list(range(100, 121)), list(range(200, 260))], [1], tokens=40, window=10)
    assert [len(window) - 1 for window in windows] == [10] * 4
    assert [window[0] for window in windows] == [1] * 4
    assert windows[1][1:] == list(range(110, 120))
    with pytest.raises(ValueError, match="a text has 21 tokens; 31 are needed"):
        divergence.windows_of([list(range(21)), list(range(60))], [], tokens=60, window=10)


@pytest.mark.slow
def test_float32_is_the_reference_and_bfloat16_is_near_it(tmp_path):
    model = bundled_model()
    arguments = ["--model", str(model), "--out", str(tmp_path), "--reference", sys.executable, "--tokens", "64"]
    arguments += ["--window", "32", "--threads", "1", "--instruction-sets", "native"]
    assert divergence.main(arguments) == 0
    by_dtype = {r["dtype"]: r for r in map(json.loads, (tmp_path / "divergence.jsonl").read_text().splitlines())}
    assert by_dtype["float32"]["mean"] < 1e-8 < by_dtype["bfloat16"]["mean"] < 0.01
    assert "| Quire | bfloat16 | native |" in (tmp_path / "divergence.md").read_text()
