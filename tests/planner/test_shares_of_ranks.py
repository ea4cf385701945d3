"""What a rank has of a model is what a worker builds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoints.metadata import hf_config
from quire.config.engine import EngineConfig
from quire.models.load import load_model
from quire.models.registry import spec_of
from quire.ops import OPS
from quire.parallel.mesh import Communicator, Mesh
from quire.planner.devices import DEVICES
from quire.planner.layout import Layout, Stages
from quire.planner.memory import EngineOptions, kv_groups, memory_of
from quire.planner.sizes import FULL, Footprint, Share, parameters_of
from quire.worker.memory import weights_in_memory
from quire.worker.worker import Worker

LENGTH = 64
PLAIN = {"dtype": "float32", "kernels": dict.fromkeys(OPS, "reference"), "device": "cpu", "load_format": "dummy"}


def built(path: Path, tp: int, pp: int = 1, stage: int = 0) -> Any:
    """The model of a rank."""
    config = EngineConfig.create(tensor_parallel_size=tp, pipeline_parallel_size=pp, **PLAIN)
    mesh = Mesh(0, size=tp * pp, tp=Communicator(0, tp), pp=Communicator(stage, pp))
    return load_model(path, config, LENGTH, torch.device("cpu"), mesh, show_progress=False).model


def tables(path: Path) -> float:
    """Bytes of what every rank has besides its share: tables of positions."""
    return weights_in_memory(built(path, 1)) - footprint_of(path).weights(None)[0]


def worker(path: Path, tp: int) -> Worker:
    options = {"max_num_seqs": 4, "num_gpu_blocks_override": 20, "enforce_eager": True, "tensor_parallel_size": tp}
    config = EngineConfig.create(model=str(path), **options, **PLAIN)
    return Worker(config, path, LENGTH, Mesh(0, size=tp, tp=Communicator(0, tp)))


def footprint_of(path: Path) -> Footprint:
    spec = spec_of(hf_config(path, {}))
    return Footprint(spec, parameters_of(spec), FULL, FULL, FULL, element_bytes=FULL)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "variant",
    ["llama", "gpt2", "gemma3", "mixtral", "deepseek_v3", "deepseek_v32", "qwen3", "falcon_h1", "qwen3_next", "jamba"],
)
def test_a_rank_has_as_many_bytes_as_counted(checkpoints, variant, tp):
    path = checkpoints.path(variant)
    expected = footprint_of(path).of(Share(tp)).weights(None)[0] + tables(path)
    assert weights_in_memory(built(path, tp)) == pytest.approx(expected, rel=0.03)  # small parts are padded


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "llama-gqa2-tied-llama3"])
def test_a_stage_has_the_layers_and_tables_that_are_counted(checkpoints, variant, stage):
    path = checkpoints.path(variant)
    model = built(path, 1, 2, stage)
    part = Stages(footprint_of(path), Layout(pp=2)).parts[stage]
    assert part.layers == model.stage.layers
    assert weights_in_memory(model) == pytest.approx(part.weights(None)[0] + tables(path), rel=0.02)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("variant", ["llama", "gemma3", "deepseek_v3", "qwen3-mixed-windows-biases", "falcon_h1"])
def test_the_groups_of_the_cache_are_those_of_a_worker(checkpoints, variant, tp):
    path = checkpoints.path(variant)
    made, footprint = worker(path, tp).kv_cache, footprint_of(path).of(Share(tp))
    assert list(made.specs) == kv_groups(footprint, LENGTH)


def test_shares_add_up(llama, mixture):
    for footprint in (llama, mixture):
        whole, parts = footprint.parameters, Stages(footprint, Layout(pp=4)).parts
        assert sum(part.parameters.total for part in parts) == whole.total
        assert [i for part in parts for i in part.layers] == list(range(footprint.spec.num_layers))
    quarter = mixture.of(Share(1, expert_ranks=4)).parameters
    assert quarter.experts * 4 == mixture.parameters.experts
    assert quarter.rest == mixture.parameters.rest


def options(**fields: Any) -> EngineOptions:
    return EngineOptions(**{"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192, **fields})


def test_more_ranks_leave_more_memory_for_the_cache(llama):
    device = DEVICES["H100"]
    one, two = (memory_of(llama, Layout(tp), device, options(), None) for tp in (1, 2))
    assert 15e9 < one.weights < 17e9
    assert one.weights == pytest.approx(2 * two.weights, rel=0.01)
    assert 300_000 < one.tokens < 550_000  # 128 KiB each
    assert two.tokens > 2 * one.tokens
    smaller = memory_of(llama, Layout(), device, options(), "int4")
    assert smaller.weights < one.weights / 2.5
    assert smaller.tokens > one.tokens
    half = memory_of(llama, Layout(), device, options(kv_element_bytes=1), None)
    assert half.tokens == pytest.approx(2 * one.tokens, rel=0.01)


def test_what_is_too_large_does_not_fit(llama):
    assert not memory_of(llama, Layout(), DEVICES["A10"], options(max_model_len=65_536), None).fits
    assert memory_of(llama, Layout(), DEVICES["A10"], options(max_model_len=2048), None).fits
    assert not memory_of(llama, Layout(), replace(DEVICES["A10"], memory=16e9), options(), None).fits


def test_a_window_keeps_less(windows, llama):
    long = options(max_model_len=8000, max_num_batched_tokens=512)
    narrow, wide = (memory_of(f, Layout(), DEVICES["H100"], long, None).tokens for f in (windows, llama))
    assert narrow > 5 * wide
