"""The parameters and the memory that are computed from a config are those of the model that an engine builds."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from quire.checkpoints import format_names
from quire.checkpoints.formats.gguf_types import TYPES
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import hf_config
from quire.cli.models.estimate import estimates
from quire.cli.models.facts import facts_of
from quire.cli.models.machine import Machine, this_machine
from quire.config.engine import EngineConfig
from quire.models.decoder import Decoder
from quire.models.load import load_model
from quire.models.registry import spec_of
from quire.parallel.mesh import Mesh
from quire.planner.sizes import Footprint, parameters_of
from quire.worker import memory
from support.checkpoints import ALL_VARIANTS, write_checkpoint
from support.engines import make_llm
from support.gguf_files import write_gguf
from support.quantized import FORMATS, FURTHER, write_quantized

ALWAYS = ("llama", "gpt2", "deepseek_v3", "kimi_linear")
WIDE = {  # so wide that norms and the padding of panels do not matter
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


def built(path: Path, **options: str) -> Decoder:
    config = EngineConfig.create(**options)
    return load_model(path, config, 128, torch.device("cpu"), Mesh(), show_progress=False).model


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.nightly]) for name in ALL_VARIANTS]
)
def test_parameters_are_counted_as_a_model_counts_them(checkpoints, variant):
    path = checkpoints.path(variant)
    counted = parameters_of(spec_of(hf_config(path, {})))
    assert counted.total == built(path, load_format="dummy").num_parameters
    assert 0 < counted.active <= counted.total


def footprint_of(path: Path) -> Footprint:
    facts = facts_of(path)
    assert facts.problem is None
    assert facts.footprint is not None
    return facts.footprint


def test_a_token_uses_some_of_the_experts(checkpoints):
    footprint = footprint_of(checkpoints.path("mixtral"))
    parameters, experts = footprint.parameters, footprint.spec.mlps[0]
    assert parameters.chosen * experts.num_experts == parameters.experts * experts.top_k
    total, read = footprint.weights(None)
    assert read < total


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "llama", "llama", WIDE, dtype="bfloat16")


@pytest.mark.sampled(25)
@pytest.mark.parametrize("kind", ["BF16", *sorted(format_names._GGUF_TYPES.keys() - {"Q2_0"})])
def test_the_memory_of_a_gguf_file_is_known(wide, tmp_path: Path, kind):
    file = write_gguf(wide, tmp_path / "model.gguf", kind)
    assert footprint_of(file).weights(None)[0] == pytest.approx(memory.weights_in_memory(built(file)), rel=0.02)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("form", [None, "gptq", "awq", "packed-4-bits", "int8-channel", "fp8", "nf4", "nvfp4", "hqq"])
def test_the_memory_of_a_checkpoint_is_known(wide, tmp_path: Path, form):
    path = wide if form is None else write_quantized(wide, tmp_path, {**FORMATS, **FURTHER}[form])[0]
    assert footprint_of(path).weights(None)[0] == pytest.approx(memory.weights_in_memory(built(path)), rel=0.02)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "deepseek_v2", "gpt2"])
def test_the_cache_of_a_token_is_known(checkpoints, variant):
    llm = make_llm(checkpoints.path(variant))
    kv = llm.core.executor.kv_cache
    layers = sum(len(spec.entries) for spec in kv.specs)
    entry = sum(kv.rank_bytes) // max(len(spec.entries) for spec in kv.specs)
    footprint = footprint_of(checkpoints.path(variant))
    wide = 2 * footprint.cache(1)  # the engine of this test keeps float32
    assert layers * entry / kv.block_size == pytest.approx(wide, rel=0.05)
    llm.shutdown()


def test_a_state_is_as_large_however_long_the_text(checkpoints):
    llm, footprint = make_llm(checkpoints.path("mamba2")), footprint_of(checkpoints.path("mamba2"))
    assert (
        footprint.cache(1) == footprint.cache(1000) == pytest.approx(sum(llm.core.executor.kv_cache.rank_bytes), 0.05)
    )
    llm.shutdown()


def test_a_window_limits_the_cache(checkpoints):
    footprint = footprint_of(checkpoints.path("mistral-window-20"))
    window = footprint.spec.windows[0]
    assert window is not None
    assert footprint.cache(window) == footprint.cache(window + 100) == window * footprint.cache(1)


def test_estimates_follow_memory_and_bandwidth():
    footprint = footprint_of(bundled_model())
    weights = [footprint.weights(quantization)[0] for quantization in (None, "int8", "int4")]
    assert weights == sorted(weights, reverse=True)
    fast, slow = (estimates(footprint, Machine("CPU", 10**9, 0.5, bandwidth)) for bandwidth in (1e9, 1e8))
    assert [estimate.context for estimate in fast] == [2048] * 3
    assert all(a.tokens_per_second > 5 * b.tokens_per_second for a, b in zip(fast, slow, strict=True))
    room = 2 * 100 * footprint.cache(1)  # half of which becomes cache
    small = estimates(footprint, Machine("CPU", int(weights[0]) + room, 0.5, 1e9))
    assert small[0].context == 100
    assert small[1].context > 100
    assert estimates(footprint, Machine("CPU", int(weights[0]) - 1, 0.5, 1e9))[0].context == 0


def test_the_machine_is_measured():
    machine = this_machine()
    assert machine.free > 2**20
    assert 1e8 < machine.bandwidth < 1e14
    assert machine.device != "CPU" or machine.cache_share == memory.FREE_SHARE


def test_types_of_gguf_files_are_those_of_the_library():
    for number, name in format_names._FILE_TYPES.items():
        if name != "Q2_0":  # newer than the library
            assert gguf.LlamaFileType(number).name in (f"MOSTLY_{name}", f"ALL_{name}")
    assert format_names._GGUF_TYPES.keys() == {kind.name for kind in TYPES.values() if not kind.is_float}
