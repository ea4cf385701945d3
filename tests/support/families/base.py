"""Types and helpers for the tables of variants."""

from __future__ import annotations

from typing import Any

# (model type, differences from the base, how the files are written): see `support.checkpoints`
Variant = tuple[str, dict[str, Any], dict[str, Any]]

MAX_POSITIONS = 256
LOCAL, GLOBAL = "sliding_attention", "full_attention"
YARN = {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "original_max_position_embeddings": 128}


def rope(theta: float, kind: str = "default", **extra: Any) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": kind, **extra}
