"""Blocks that leave the KV cache are found in CPU memory and on disk, and nothing that can happen to them is heard."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from quire.kv.tiers import SlotIndex, memory_slots, rank_region
from quire.messages.sampling_params import SamplingParams
from support.engines import make_llm
from support.server import eventually
from support.server_process import Server
from support.streams import MODEL, all_streams

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXTS = [[3 + (7 * i + 5 * j + j // 9) % 90 for j in range(120)] for i in range(6)]
IN_MEMORY: dict[str, Any] = {"kv_offloading_size": 0.05}


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"kv_offloading_path": str(folder / "kv"), **more}


def settle(llm: LLM) -> None:
    """Wait until nothing is on its way, and everything that was held has been given back."""
    transfers, pool = llm.core.scheduler.transfers, llm.core.scheduler.kv.pool

    def is_quiet() -> bool:
        llm.core.scheduler.open_gates()
        return not transfers.moving

    eventually(is_quiet)
    assert pool.num_free == pool.num_usable


def say(llm: LLM, texts: list[list[int]] = TEXTS) -> tuple[list[list[int]], list[int]]:
    """Each text alone, one after the other: what follows it, and how many of its tokens were not computed."""
    made, cached = [], []
    for text in texts:
        output = llm.generate([text], SHORT, use_tqdm=False)[0]
        made.append(output.outputs[0].token_ids)
        cached.append(output.num_cached_tokens or 0)
        if llm.core.scheduler.transfers is not None:
            settle(llm)
    return made, cached


def small(path: Path, **options: Any) -> LLM:
    """An engine whose KV cache holds two of the texts at most."""
    return make_llm(path, **{"num_gpu_blocks_override": 24, "max_num_seqs": 2, **options})


@pytest.mark.sampled(18)
@pytest.mark.parametrize("variant", ["llama", "mistral-window-20", "gemma3", "deepseek_v3", "mamba2", "bamba"])
@pytest.mark.parametrize(
    "tiers", [*(pytest.param(t, marks=pytest.mark.sampled(3)) for t in ("memory", "disk")), "both"]
)
def test_what_has_left_the_cache_is_loaded_and_says_the_same(checkpoints, tmp_path, variant, tiers):
    path = checkpoints.path(variant)
    blocks = {"num_gpu_blocks_override": 60} if variant in ("gemma3", "bamba") else {}  # with several groups
    options = {**(IN_MEMORY if tiers != "disk" else {}), **(on_disk(tmp_path) if tiers != "memory" else {})}
    expected, _ = say(small(path, **blocks))
    llm = small(path, **blocks, **options)
    assert say(llm)[0] == expected
    again, cached = say(llm)
    assert again == expected
    assert min(cached) >= 96
    assert llm.core.stats.external_hits > 0
    together = llm.generate(TEXTS, SHORT, use_tqdm=False)  # they wait, load, and preempt each other
    assert [output.outputs[0].token_ids for output in together] == expected
    settle(llm)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, id="pp", marks=pytest.mark.nightly),
    ],
)
def test_each_rank_keeps_its_part(checkpoints, tmp_path, options):
    path = checkpoints.path("llama")
    expected, _ = say(small(path))
    llm = small(path, **options, **IN_MEMORY, **on_disk(tmp_path))
    assert say(llm)[0] == expected
    assert say(llm) == (expected, [112] * len(TEXTS))
    assert len(list((tmp_path / "kv").iterdir())) == 2  # a folder for each rank
    llm.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [[2, 1], pytest.param([1, 2], marks=pytest.mark.nightly)], ids=str)
def test_ranks_with_unequal_layers_have_equally_many_blocks_in_memory(checkpoints, layers):
    path = checkpoints.path("llama")
    whole = small(path)
    expected, _ = say(whole)
    num_blocks = sum(len(text) // 16 for text in TEXTS)
    block_bytes = whole.core.executor.kv_cache.rank_bytes[0]
    size = num_blocks * (block_bytes + SlotIndex.RECORD.size) + SlotIndex.RECORD.size
    llm = small(path, pipeline_parallel_size=2, pipeline_layers=layers, kv_offloading_size=(size + 1) / 2**30)
    assert say(llm)[0] == expected
    assert len(llm.core.scheduler.transfers.tiers[0]) == num_blocks, "there is room for all of them"
    assert say(llm) == (expected, [112] * len(TEXTS))
    llm.shutdown()


@given(st.integers(0, 100_000), st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_the_slots_of_ranks_lie_one_behind_the_other_in_the_memory(total, rank_bytes):
    num_slots, end = memory_slots(total, rank_bytes), SlotIndex.RECORD.size
    end += num_slots * SlotIndex.RECORD.size
    for rank, block_bytes in enumerate(rank_bytes):
        start, stop = rank_region(num_slots, rank_bytes, rank)
        assert start == end
        assert stop - start == num_slots * block_bytes
        end = stop
    assert not num_slots or end <= total


def test_two_steps_in_flight(checkpoints):
    path = checkpoints.path("llama")
    expected, _ = say(small(path))
    llm = small(path, async_scheduling=True, **IN_MEMORY)
    say(llm)
    assert say(llm) == (expected, [112] * len(TEXTS))


def test_files_are_found_by_the_next_engine_and_by_others_at_the_same_time(checkpoints, tmp_path):
    path = checkpoints.path("llama")
    first, second = small(path, **on_disk(tmp_path)), small(path, **on_disk(tmp_path))
    expected, _ = say(first)
    assert say(second) == (expected, [112] * len(TEXTS))
    assert say(small(path, **on_disk(tmp_path)))[1] == [112] * len(TEXTS)
    other = small(path, **on_disk(tmp_path), kv_cache_dtype="int8")  # its blocks have other bytes
    assert say(other)[1] == [0] * len(TEXTS)


def test_the_folder_is_private_and_bounded_and_the_oldest_files_leave(checkpoints, tmp_path):
    path = checkpoints.path("llama")
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    llm = small(path, **on_disk(tmp_path, kv_offloading_disk_size="800k"))
    assert folder.stat().st_mode & 0o777 == 0o700
    say(llm)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert 400_000 < sum(file.stat().st_size for file in files) <= 800_000
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    made, cached = say(llm, TEXTS[::-1])
    assert (cached[2], cached[-1]) == (112, 0)  # the third last text is on disk, and the first one no longer
    assert made == say(small(path), TEXTS[::-1])[0]


def damaged(data: bytearray) -> bytearray:
    data[5000] ^= 1
    return data


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [damaged, lambda data: data[:6000], lambda data: b""])
def test_damaged_files_are_noticed_and_computed(checkpoints, tmp_path, damage, caplog):
    path = checkpoints.path("llama")
    expected, _ = say(small(path, **on_disk(tmp_path)))
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    for file in files[::2]:
        file.write_bytes(damage(bytearray(file.read_bytes())))
    llm = small(path, **on_disk(tmp_path))
    made, cached = say(llm)
    assert made == expected
    assert sum(cached) < 112 * len(TEXTS)
    assert any("its content was changed" in line for line in caplog.text.splitlines())
    assert say(llm)[0] == expected


def test_files_that_vanish_are_computed(checkpoints, tmp_path):
    path = checkpoints.path("llama")
    llm = small(path, **on_disk(tmp_path))
    expected, _ = say(llm)
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    assert say(llm)[0] == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_a_full_disk_is_left_out(checkpoints, tmp_path, caplog):
    path = checkpoints.path("llama")
    folder = tmp_path / "kv"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        expected, _ = say(small(path))
        llm = small(path, **on_disk(tmp_path))
        assert say(llm)[0] == expected
        assert say(llm)[0] == expected
        assert sum("KV blocks cannot be saved" in line for line in caplog.text.splitlines()) == 1
        assert not list(folder.rglob(".*.kv*")), "what was begun was left behind"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_tier_that_does_not_answer_is_left_out(checkpoints, tmp_path, monkeypatch, caplog):
    path = checkpoints.path("llama")
    llm = small(path, **on_disk(tmp_path))
    expected, _ = say(llm)
    settle(llm)
    monkeypatch.setattr("quire.kv.transfers.LATE_SECONDS", 0.3)
    store = llm.core.executor._transfers._stores[0]
    read, stuck = store._read, [True]

    def wait(*arguments: Any) -> None:
        eventually(lambda: not stuck)
        read(*arguments)

    store._read = wait
    made = [llm.generate([text], SHORT, use_tqdm=False)[0].outputs[0].token_ids for text in TEXTS[:3]]
    assert made == expected[:3]
    assert sum("has not answered" in line for line in caplog.text.splitlines()) == 1
    stuck.clear()
    settle(llm)
    assert say(llm)[0] == expected


def test_an_engine_that_has_slept_loads_what_it_had(checkpoints, tmp_path):
    llm = small(checkpoints.path("llama"), **IN_MEMORY, **on_disk(tmp_path))
    expected, _ = say(llm)
    llm.sleep()
    llm.wake_up()
    assert say(llm) == (expected, [112] * len(TEXTS))


def test_salts_keep_tenants_apart_in_all_tiers(checkpoints, tmp_path):
    llm = small(checkpoints.path("llama"), **IN_MEMORY, **on_disk(tmp_path))

    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": TEXTS[0], "cache_salt": salt}
        output = llm.generate([prompt], SHORT, use_tqdm=False)[0]
        settle(llm)
        say(llm, TEXTS[1:])  # drives it out of the pool
        return output.num_cached_tokens or 0

    assert [cached(salt) for salt in ("a", "b", "a", "b")] == [0, 0, 112, 112]


def test_a_reset_forgets_what_is_beyond_the_pool_only_if_asked(checkpoints, tmp_path):
    llm = small(checkpoints.path("llama"), **IN_MEMORY, **on_disk(tmp_path))
    say(llm)
    llm.reset_prefix_cache()
    assert say(llm)[1] == [112] * len(TEXTS)
    llm.reset_prefix_cache(reset_external=True)
    assert say(llm)[1] == [0] * len(TEXTS)
    assert say(llm)[1] == [112] * len(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"kv_offloading_size": -1.0}, "is a number of GiB"),
        ({"kv_offloading_size": 1e-6}, "no room for a block"),
        ({"kv_offloading_disk_size": "1G"}, "give that, too"),
        ({"kv_offloading_path": "/proc/nothing"}, "kv_offloading_path='/proc/nothing'"),
    ],
)
def test_options_that_cannot_work_are_refused(checkpoints, options, message):
    with pytest.raises(ConfigError, match=message):
        small(checkpoints.path("llama"), **options)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGKILL, []),
        (signal.SIGSTOP, ["--tensor-parallel-size", "2"]),
        pytest.param(signal.SIGSTOP, [], marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, ["--tensor-parallel-size", "2"], marks=pytest.mark.nightly),
    ],
)
def test_memory_survives_its_core(number, ranks):
    """Streams go on when the core is lost, and the next core finds the blocks of the first one."""
    arguments = ["--dtype", "float32", "--kv-offloading-size", "0.1", "--served-model-name", MODEL, *ranks]
    with Server(*arguments) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

        def ask() -> tuple[str, int]:
            text = "The lighthouse keeper counted the waves. " * 8
            answer = client.completions.create(model=MODEL, prompt=text, max_tokens=4, temperature=0)
            details = answer.usage.prompt_tokens_details
            return answer.choices[0].text, 0 if details is None else details.cached_tokens or 0

        said, cached = ask()
        assert cached == 0
        expected = asyncio.run(all_streams(server.url))
        assert asyncio.run(all_streams(server.url, lambda: server.core.send_signal(number))) == expected
        assert "are filled" in server.log
        again, cached = ask()
        assert (again, cached > 64) == (said, True)
        assert server.metric("external_prefix_cache_hits_total") >= cached
        server.wait_until_idle()
