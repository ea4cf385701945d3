"""What a core records about each request for the page's timeline."""

from __future__ import annotations

import json
from typing import Any

from quire.engine.core import EngineCore
from quire.engine.observation import lives as module
from quire.messages.sampling_params import SamplingParams
from support.checkpoints import Checkpoints
from support.engines import core_request, make_llm

LLAMA = "llama-gqa2-tied-llama3"
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(70 + 9 * i)] for i in range(5)]


def changes(core: EngineCore, viewer: str = "a") -> dict[str, dict[str, Any]]:
    return {life["id"]: life for life in json.loads(core.look(viewer))["lives"]}


def follow(core: EngineCore) -> dict[str, dict[str, Any]]:
    """Run until all requests have ended. Returns their last lives."""
    found: dict[str, dict[str, Any]] = {}
    while core.has_unfinished:
        core.step()
        found |= changes(core)
    return found


def test_a_life_adds_up_to_its_request(checkpoints: Checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), max_num_batched_tokens=48, num_gpu_blocks_override=60)
    core = llm.core
    assert changes(core) == {}
    core.add_request(core_request(llm, "first", PROMPTS[0], GREEDY))
    life = follow(core)["first"]
    assert life["prompt"] == len(PROMPTS[0])
    assert [tokens for *_, tokens in life["chunks"]] == [48, len(PROMPTS[0]) - 48]
    assert life["output"] == life["steps"] == 30
    assert life["arrived"] <= life["began"] <= life["chunks"][0][0] < life["chunks"][0][1] <= life["first"]
    assert life["first"] < life["last"] <= life["ended"] + 1
    assert changes(core) == {}, "nothing has changed since"
    assert changes(core, "b").keys() == {"first"}, "another viewer gets it, too"
    core.add_request(core_request(llm, "again", PROMPTS[0], GREEDY))
    again = follow(core)["again"]
    assert again["cached"] == len(PROMPTS[0]) // 16 * 16
    assert sum(tokens for *_, tokens in again["chunks"]) == len(PROMPTS[0]) - again["cached"]


def test_preemptions_and_queues_are_recorded(checkpoints: Checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), max_num_batched_tokens=48, num_gpu_blocks_override=30, max_num_seqs=4)
    core = llm.core
    changes(core)
    for number, prompt in enumerate(PROMPTS):
        core.add_request(core_request(llm, str(number), prompt, GREEDY))
    found = follow(core)
    assert found.keys() == set("01234")
    preempted = [life for life in found.values() if life.get("preemptions")]
    assert preempted
    assert all(before <= after for life in preempted for before, after in life["preemptions"])
    assert found["4"]["began"] > found["0"]["first"], "it waited for a row"
    assert all(life["ended"] and life["output"] == 30 for life in found.values())


def test_aborted_requests_end_and_old_ones_are_dropped(checkpoints: Checkpoints, monkeypatch):
    monkeypatch.setattr(module, "MOST_ENDED", 2)
    llm = make_llm(checkpoints.path(LLAMA), max_num_batched_tokens=48, num_gpu_blocks_override=60)
    core = llm.core
    changes(core)
    core.add_request(core_request(llm, "gone", PROMPTS[0], GREEDY))
    core.step()
    core.step()
    core.abort_requests(["gone"])
    core.step()
    assert changes(core)["gone"]["ended"] > 0
    for name in ("one", "two", "three"):
        core.add_request(core_request(llm, name, PROMPTS[1], GREEDY))
        follow(core)
    assert changes(core, "b").keys() == {"two", "three"}
