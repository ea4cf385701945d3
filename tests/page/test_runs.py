"""The recorded runs are what the bundled model does, and show what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import record_runs

RUNS = {run["name"]: run for run in json.loads(record_runs.TARGET.read_text(encoding="utf-8"))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", record_runs.RUNS, ids=lambda run: run.name)
def test_a_run_is_as_it_was_recorded(run: record_runs.Run):
    assert record_runs.Recorder(run).record() == RUNS[run.name]


@pytest.mark.parametrize("name", RUNS)
def test_tokens_lie_in_the_slots_of_their_blocks(name: str):
    run, texts = RUNS[name], dict[str, list[str]]()
    for step in run["steps"]:
        used = [slot for part in step["parts"] for slot in part["slots"]]
        assert len(used) == len(set(used)), "no two tokens of a step share a slot"
        for part in step["parts"]:
            known = texts.setdefault(part["id"], list(run["prompts"][part["id"]]))
            size = run["block_size"]
            for token, position, slot in zip(part["tokens"], part["positions"], part["slots"], strict=True):
                assert slot == part["table"][position // size] * size + position % size
                assert position >= len(known) or known[position] == token
            known += part["sampled"]


def parts(name: str) -> list[dict[str, Any]]:
    return [part for step in RUNS[name]["steps"] for part in step["parts"]]


def test_each_run_shows_its_mechanism():
    chunks = [part for part in parts("chunks") if part["id"] == "C" and len(part["positions"]) > 1]
    assert len(chunks) > 2
    assert [part["found"] for part in parts("sharing") if part["found"]] == [16, 16]
    assert any(step["preempted"] for step in RUNS["preemption"]["steps"])
    drafted = [(part["drafts"], len(part["sampled"])) for part in parts("speculation") if part["drafts"]]
    assert any(count == drafts + 1 for drafts, count in drafted)
    assert any(count == 1 for _, count in drafted)
