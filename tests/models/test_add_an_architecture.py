"""The example of docs/add-an-architecture.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.models.registry import ARCHITECTURES
from support.checkpoints import write_checkpoint
from support.engines import generate, make_llm, teacher_forced_logits, tokens_of
from support.reference import greedy, load, logits, prompts

PAGE = Path(__file__).parents[2] / "docs" / "add-an-architecture.md"


def test_the_example_equals_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "Starcoder2ForCausalLM", None)  # the page sets it; afterwards it is gone again
    scope: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        exec(block, scope)
    for name, config in {
        "usual": {"sliding_window": 20, "tie_word_embeddings": True},
        "odd": {"sliding_window": None, "use_bias": False, "num_key_value_heads": 1, "hidden_size": 96},
    }.items():
        path = write_checkpoint(tmp_path / name, "starcoder2", config)
        model, llm = load(path), make_llm(path)
        expected = greedy(model, prompts(320, 9))
        for continuation, token_ids in zip(
            expected, tokens_of(generate(llm, [c.prompt for c in expected])), strict=True
        ):
            continuation.check(token_ids)
        text = expected[-1].prompt + expected[-1].token_ids
        right = logits(model, text)
        assert (teacher_forced_logits(llm, text) - right).abs().max() / right.std() < 5e-5
