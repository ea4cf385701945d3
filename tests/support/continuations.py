"""Greedy continuations that transformers has computed before: tests/data/continuations.jsonl, a line for each variant.

Computing them takes longer than most tests that compare with them. A line is used as long as its key is that of the
variant: a hash of the model's recipe, of how its weights are drawn and its prompts made, and of transformers' version.
Otherwise transformers computes them again. `python tests/data/record_continuations.py` writes the file.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support import checkpoints, layouts
from support.families import REFERENCE_CONFIG
from support.stand_in_layouts import CHANGED

FILE = Path(__file__).parents[1] / "data" / "continuations.jsonl"
DRAWN = (
    checkpoints.build,
    checkpoints.scale_weights,
    checkpoints.bias_size,
    checkpoints.norm_size,
    checkpoints.gain,
    layouts.stand_in_config,
)
# The files with models that transformers lacks
OWN_MODELS = {
    "rwkv7": "rwkv7.py",
    "step3p5": "text_models.py",
    "muse_glimmer_text": "text_models.py",
    **dict.fromkeys(CHANGED, "stand_ins.py"),
    "step1": "changed_attention.py",
    "bailing_moe_linear": "lightning.py",
    "iquestloopcoder": "loops.py",
    "deepseek_v4": "grouped_tokens.py",
    "minimax_m3_vl_text": "grouped_tokens.py",
    "glm5_next_text": "grouped_tokens.py",
}
Tokens = list[tuple[list[int], int]]  # the greedy tokens of each prompt, and how many come before the first tie


def key(variant: str, *computed: Any) -> str:
    """computed: the functions that make the prompts and the continuations."""
    recipe = checkpoints.ALL_VARIANTS[variant]
    sources = [_unformatted(inspect.getsource(function)) for function in (*DRAWN, *computed)]
    if own := OWN_MODELS.get(recipe[0]):
        sources.append(_unformatted((Path(__file__).parent / own).read_text()))
    parts = [version("transformers"), checkpoints.BASE, recipe, REFERENCE_CONFIG.get(variant), sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _unformatted(source: str) -> str:
    """The code without comments, in one form however it is formatted."""
    return ast.unparse(ast.parse(textwrap.dedent(source)))


@cache
def _recorded() -> dict[str, dict[str, Any]]:
    if not FILE.exists():
        return {}
    return {line["variant"]: line for line in map(json.loads, FILE.read_text().splitlines())}


def recorded(variant: str, expected_key: str) -> Tokens | None:
    """None if there are none, or if they are from another recipe or another version of transformers."""
    line = _recorded().get(variant)
    if line is None or line["key"] != expected_key:
        return None
    return [(token_ids, certain) for certain, *token_ids in line["continuations"]]


def recorded_with(variant: str) -> str:
    """The version of transformers that computed the recorded continuations."""
    return str(_recorded()[variant]["transformers"])


def line_of(variant: str, variant_key: str, continuations: Tokens) -> str:
    rows = [[certain, *token_ids] for token_ids, certain in continuations]
    line = {"variant": variant, "transformers": version("transformers"), "key": variant_key, "continuations": rows}
    return json.dumps(line, separators=(",", ":"))
