"""The diff of docs/add-an-architecture.md, applied to a copy of the files, adds a family that equals transformers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import ARCHITECTURES
from support.checkpoints import write_checkpoint
from support.engines import generate, make_llm, teacher_forced_logits, tokens_of
from support.families.base import rope
from support.reference import greedy, load, logits, prompts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-architecture.md"
NAME = "HeliumForCausalLM"


def applied() -> dict[str, str]:
    """Path -> the file's content with the page's diff."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = {}
    for before, path, hunk in re.findall(
        r"--- (\S+)\n\+\+\+ b/(\S+)\n@@\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.MULTILINE
    ):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        if before == "/dev/null":
            assert not (ROOT / path).exists()
            files[path] = new
        else:
            text = (ROOT / path).read_text()
            assert text.count(old) == 1
            files[path] = text.replace(old, new)
    return files


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The changed files, with the family in the registry."""
    files = applied()
    module, _, function = tomllib.loads(files["quire/models/registry.toml"])["decoders"][NAME].partition(":")
    scope: dict[str, Any] = {}
    exec(files[f"quire/models/architectures/{module}.py"], scope)
    monkeypatch.setitem(ARCHITECTURES, NAME, scope[function])
    return files


def test_the_family_equals_transformers(tmp_path, files):
    text = next(text for path, text in files.items() if path.startswith("tests/support/families"))
    entries = re.findall(r'^    "(helium[^"]*)": (\(.*?\)),$', text, re.DOTALL | re.MULTILINE)
    assert len(entries) == 2
    for name, entry in entries:
        kind, config, _ = eval(entry, {"rope": rope})
        path = write_checkpoint(tmp_path / name, kind, config)
        model, llm = load(path), make_llm(path, model_impl="quire")
        expected = greedy(model, prompts(320, 9))
        for continuation, token_ids in zip(
            expected, tokens_of(generate(llm, [c.prompt for c in expected])), strict=True
        ):
            continuation.check(token_ids)
        text = expected[-1].prompt + expected[-1].token_ids
        right = logits(model, text)
        assert (teacher_forced_logits(llm, text) - right).abs().max() / right.std() < 5e-5


def test_the_changed_tables_can_be_read(files):
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
