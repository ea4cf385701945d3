"""Where a model runs, what travels there, and how much memory is left for keys and values."""

from __future__ import annotations

import logging
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import quire.ops
from quire.config.engine import ConfigError, EngineConfig
from quire.messages.media import EncoderLimits
from quire.ops import triton_works
from quire.worker import memory
from quire.worker.device import layout, on_gpu, pack, unpack
from support.engines import GREEDY, generate, make_llm, tokens_of

GPU = torch.device("cuda", 0)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@without_gpu
def test_a_gpu_that_is_not_there_is_an_error_that_says_so(checkpoints):
    assert not on_gpu("auto")
    with pytest.raises(ConfigError, match="device='cuda' was asked for, but torch finds no GPU"):
        make_llm(checkpoints.path("llama"), device="cuda")


def test_without_a_c_compiler_triton_is_not_used(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quire.ops, "find_spec", lambda name: object())
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    assert triton_works() == any(map(shutil.which, ("gcc", "clang", "cc")))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not triton_works()
    assert "Triton finds no C compiler" in caplog.text


def test_steps_are_larger_on_a_gpu():
    options = EngineConfig().scheduler
    assert (options.tokens_of_a_step(gpu=False), options.tokens_of_a_step(gpu=True)) == (512, 8192)
    assert EngineConfig.create(max_num_seqs=600).scheduler.tokens_of_a_step(gpu=False) == 600
    assert EngineConfig.create(max_num_batched_tokens=300).scheduler.tokens_of_a_step(gpu=True) == 300


def test_two_steps_in_flight_may_be_asked_for_on_a_cpu_too(checkpoints, references):
    llm = make_llm(checkpoints.path("llama"), async_scheduling=True)
    assert llm.core.scheduler.limits.depth == 2
    expected = references.continuations("llama")[:8]
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected]), strict=True):
        continuation.check(output.outputs[0].token_ids)


def test_arrays_arrive_as_they_were_sent():
    arrays: dict[str, Any] = {
        "ids": np.arange(5),
        "none": np.zeros((2, 0), np.int64),
        "parts": np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],
        "flags": np.array([True, False, True]),
        "shares": np.linspace(0, 1, 7, dtype=np.float32),
        "last": np.zeros(0, np.float32),
    }
    ends = layout(arrays)
    buffer = torch.zeros(max(ends.values()), dtype=torch.uint8)
    pack(arrays, ends, buffer.numpy())
    made = unpack(arrays, ends, buffer)
    assert made.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(made[name].numpy(), array)
        assert made[name].numpy().dtype == array.dtype


# ---- memory of a GPU, on numbers that torch might give


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(free=70 << 30, total=80 << 30, allocated=16 << 30, peak=18 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state.free, state.total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: state.peak)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    return state


def config(**options: Any) -> EngineConfig:
    return EngineConfig.create(**options)


def test_the_budget_is_a_share_of_the_gpu_less_what_others_use(gpu):
    assert memory.budget(config(gpu_memory_utilization=0.8), GPU) == int(0.8 * (80 << 30)) - (10 << 30)
    with pytest.raises(ConfigError, match=r"asks for 72.00 GiB of the GPU's 80.00 GiB, but only 70.00 GiB are free"):
        memory.budget(config(), GPU)


def test_keys_and_values_get_what_weights_libraries_a_step_and_graphs_leave(gpu, checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    gpu.allocated = 0
    gauge = memory.Gauge(GPU)
    gpu.allocated = 16 << 30
    gpu.free -= 17 << 30  # 1 GiB is not torch's
    assert gauge.used() == 17 << 30
    step = memory.largest_step(llm.core.executor.runner, 100, EncoderLimits())
    assert step == (100, 2 << 30, 0)
    left = memory.left_for_cache(60 << 30, gauge.used(), step, graphs=1 << 30)
    assert left == (60 - 17 - 2 - 1 << 30) - (256 << 20)
    with pytest.raises(ConfigError, match=r"nothing is left .* libraries take 17.00 GiB, a step of 100 tokens 2.00"):
        memory.left_for_cache(20 << 30, gauge.used(), step, graphs=1 << 30)
    assert memory.num_blocks(config(), left, 1 << 20, 10**6, GPU) == left >> 20
    assert memory.num_blocks(config(), left, 1 << 20, 1000, GPU) == 1000
    assert tokens_of(generate(llm, [[5, 6]], GREEDY.clone(max_tokens=3)))


def test_ranks_that_share_a_gpu_count_only_their_own_memory(gpu):
    gpu.allocated = 0
    gauge = memory.Gauge(GPU, ranks=2)
    gpu.allocated = 16 << 30
    gpu.free -= 33 << 30
    assert gauge.used() == 16 << 30


def test_weights_that_do_not_fit_say_what_to_do(gpu):
    message = r"the model's weights do not fit into the GPU's 80.00 GiB; take a smaller"
    with pytest.raises(ConfigError, match=message), memory.explained("the model's weights", GPU):
        raise torch.OutOfMemoryError
