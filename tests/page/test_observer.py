"""What a core records for the page: the same numbers as the requests' own, and nothing while nobody looks."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.observation import observer
from quire.messages.sampling_params import SamplingParams
from quire.messages.transfers import Transfer
from support.checkpoints import Checkpoints
from support.engines import core_request, generate, make_llm
from support.late_device import run_late
from support.server import eventually
from support.waiting import LONGEST

LLAMA = "llama-gqa2-tied-llama3"
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(70 + 9 * i)] for i in range(5)]


@pytest.fixture(autouse=True)
def _patience(monkeypatch) -> None:
    """What is recorded stays, also on a slow machine."""
    monkeypatch.setattr(observer, "IDLE_SECONDS", LONGEST)
    monkeypatch.setattr(observer, "WINDOW_SECONDS", LONGEST)


@pytest.fixture
def llm(checkpoints: Checkpoints) -> Any:
    return make_llm(checkpoints.path(LLAMA), max_num_batched_tokens=48, num_gpu_blocks_override=60)


def look(core: EngineCore, viewer: str = "a") -> dict[str, Any]:
    return json.loads(core.look(viewer))


def cells(view: dict[str, Any], before: str = "") -> str:
    for part in view["cells"]:
        end = part["start"] + len(part["states"])
        before = before[: part["start"]] + part["states"] + before[end:]
    return before


def truth(core: EngineCore) -> str:
    blocks = core.scheduler.kv.pool.blocks[1:]
    return "".join(str(min(9, b.ref_cnt + 1)) if b.ref_cnt else str(int(b.block_hash is not None)) for b in blocks)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_add_up_to_the_tokens_of_the_requests(llm, depth):
    if depth == 2:
        run_late(llm)
    look(llm.core)
    outputs = generate(llm, PROMPTS, GREEDY)
    steps = look(llm.core)["steps"]
    assert sum(step.get("prompt", 0) + step.get("cached", 0) for step in steps) >= sum(map(len, PROMPTS))
    assert sum(step.get("decode", 0) for step in steps) >= sum(len(o.outputs[0].token_ids) - 1 for o in outputs)
    assert [step["id"] for step in steps] == sorted({step["id"] for step in steps})
    assert all(step["ms"].keys() == {"schedule", "submit", "sample", "wait", "update"} for step in steps)
    assert look(llm.core)["steps"] == [], "steps are told once"
    assert len(look(llm.core, "b")["steps"]) == len(steps), "to each viewer"


def test_a_viewer_can_follow_the_map_and_the_requests(checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), max_num_batched_tokens=48, num_gpu_blocks_override=30)
    core = llm.core
    seen: dict[str, Any] = {}
    shown = cells(look(core))
    for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        core.add_request(core_request(llm, str(number), prompt, GREEDY))
    states = set()
    while core.has_unfinished:
        core.step()
        view = look(core)
        shown = cells(view, shown)
        assert shown == truth(core)
        assert view["num_free"] == core.scheduler.kv.pool.num_free
        for request in view["requests"]:
            found = core.scheduler.requests[request["id"]]
            seen[request["id"]] = request.get("blocks", seen.get(request["id"]))
            held = [block.block_id for table in found.blocks.tables for block in table]
            assert (seen[request["id"]] or []) == held
            assert (request["computed"], request["prompt"], request["most"]) == (
                found.num_retired_tokens,
                found.num_prompt_tokens,
                found.max_total_tokens,
            )
            states.add(request["state"])
        assert {request["id"] for request in view["requests"]} == core.scheduler.requests.keys()
    assert {"running", "waiting"} <= states
    assert look(core)["totals"]["preemptions"] > 0
    assert len(look(core)["ttft"]) == 3
    assert look(core)["rates"]["output"] > 0


def test_shared_blocks_count_their_users(llm):
    core = llm.core
    for name in "abc":
        core.add_request(core_request(llm, name, PROMPTS[0], GREEDY))
    core.step()
    core.step()
    assert max(cells(look(core))) == "4"


def test_a_large_pool_is_looked_at_in_turns(llm, monkeypatch):
    monkeypatch.setattr(observer, "MOST_CELLS", 20)
    monkeypatch.setattr(observer, "MOST_SCANNED", 9)
    core = llm.core
    view = look(core)
    assert (view["blocks_per_cell"], len(view["cells"][0]["states"])) == (3, 20)
    core.add_request(core_request(llm, "a", PROMPTS[0], GREEDY))
    core.step()
    core.step()
    shown = cells(look(core), cells(view))
    blocks = truth(core)
    assert shown == "".join(max(blocks[at : at + 3]) for at in range(0, len(blocks), 3)), "requests come first"
    while core.has_unfinished:
        core.step()
    for _ in range(8):
        shown = cells(look(core), shown)
    blocks = truth(core)
    assert shown == "".join(max(blocks[at : at + 3]) for at in range(0, len(blocks), 3))


def test_nothing_is_recorded_while_nobody_looks(llm, monkeypatch):
    core = llm.core
    untouched = core.scheduler.__dict__.keys(), core.executor.__dict__.keys()
    before = [set(keys) for keys in untouched]
    assert core.scheduler.connectors == []
    look(core)
    assert "schedule" in core.scheduler.__dict__
    assert len(core.scheduler.connectors) == 1
    monkeypatch.setattr(observer, "IDLE_SECONDS", -1.0)
    expected = generate(llm, PROMPTS, GREEDY)
    assert core.scheduler.connectors == []
    assert [set(keys) for keys in untouched] == before
    monkeypatch.setattr(observer, "IDLE_SECONDS", LONGEST)
    look(core)
    again = generate(llm, PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
    assert look(core)["steps"], "it is recorded again"


def test_what_lies_in_tiers_and_moves_is_seen(checkpoints, tmp_path):
    options = {"kv_offloading_size": 0.0002, "kv_offloading_path": str(tmp_path / "kv")}
    llm = make_llm(checkpoints.path(LLAMA), num_gpu_blocks_override=24, max_num_seqs=2, **options)
    transfers = llm.core.scheduler.transfers
    memory, disk = transfers.tiers

    def settle() -> None:
        eventually(lambda: (llm.core.scheduler.open_gates(), not transfers.moving)[1])

    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    settle()
    first, second = look(llm.core)["tiers"]
    assert (first["kind"], first["filled"], first["most"]) == ("memory", len(memory), memory.num_slots)
    assert first["cells"].count("1") == first["filled"] > 0
    assert (second["kind"], second["filled"]) == ("disk", len(disk))
    assert "saved" not in first, "nothing was counted before the first look"
    for prompt in [*PROMPTS, *PROMPTS]:
        llm.generate([prompt], GREEDY, use_tqdm=False)
        settle()
    before = first["filled"]
    first, second = look(llm.core)["tiers"]
    assert first["left"] == before + first["saved"] - first["filled"] > 0
    assert first["filled"] == len(memory) == first["cells"].count("1")
    assert second["filled"] == len(disk) == sum(1 for file in (tmp_path / "kv").rglob("*.kv"))
    hits = first.get("loaded", 0) + second.get("loaded", 0)
    assert hits * llm.core.scheduler.kv.block_size == llm.core.scheduler.transfers.num_hits > 0
    assert not {"failed", "saving", "loading"} & (first.keys() | second.keys())


def test_blocks_that_are_on_their_way_are_seen(checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), num_gpu_blocks_override=24, kv_offloading_size=0.001)
    look(llm.core)
    waiting: list[tuple[Transfer, Future[list[int]]]] = []

    def hold(order: Transfer) -> Future[list[int]]:
        waiting.append((order, Future()))
        return waiting[-1][1]

    llm.core.executor.transfer = hold
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    (tier,) = look(llm.core)["tiers"]
    assert tier["saving"] == sum(len(order.keys) for order, _ in waiting) > 0
    assert tier["cells"].count("2") == tier["saving"]
    for order, future in waiting:
        future.set_result(list(range(len(order.keys))))
    llm.core.scheduler.open_gates()
    (tier,) = look(llm.core)["tiers"]
    assert tier["failed"] > 0
    assert "1" not in tier["cells"]


@pytest.mark.nightly
def test_ranks_have_their_parts_of_blocks_and_use_processors(checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), pipeline_parallel_size=2, pipeline_layers=[2, 1])
    first = look(llm.core)["ranks"]
    assert [rank["block_bytes"] for rank in first] == list(llm.core.executor.kv_cache.rank_bytes)
    assert first[0]["block_bytes"] == 2 * first[1]["block_bytes"]
    generate(llm, PROMPTS, GREEDY.clone(max_tokens=100))
    second = look(llm.core)["ranks"]
    assert all(after["seconds"] > before["seconds"] > 0 for before, after in zip(first, second, strict=True))
    process = llm.core.executor._ranks.groups[0].processes[1]
    process.kill()
    process.wait()
    assert "seconds" not in look(llm.core)["ranks"][1]
    llm.shutdown()


def test_drafts_are_counted(checkpoints):
    llm = make_llm(checkpoints.path(LLAMA), speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    look(llm.core)
    generate(llm, [[5, 6, 7, 8] * 20], GREEDY.clone(max_tokens=40))
    steps, counts = look(llm.core)["steps"], llm.core.scheduler.speculation.counts()
    assert sum(step.get("accepted", 0) for step in steps) == counts.accepted_tokens
    assert sum(step.get("accepted", 0) + step.get("rejected", 0) for step in steps) == counts.draft_tokens > 0
