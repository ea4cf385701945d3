"""Weights and cache that leave a rank's memory and come back, and weights that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoints.hub import bundled_model
from quire.engine.llm import LLM
from quire.lora import LoRARequest
from quire.messages.sampling_params import SamplingParams
from quire.worker.resident_memory import DeviceMemory, _tensors
from support.checkpoints import FAMILIES
from support.engines import make_llm
from support.quantized import gptq, write_quantized

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [list(range(10, 60)), [7, 8, 9], list(range(10, 58)) + [3] * 9]
EDIT = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def edited(source: Path, folder: Path, edit: EDIT) -> Path:
    """A copy of a checkpoint with other weights."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            save_file(edit(load_file(file)), folder / file.name)
        elif file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def shuffled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor with its rows in another order: other weights of the same scale."""
    draw = torch.Generator().manual_seed(3)
    return {name: t[torch.randperm(len(t), generator=draw)].clone() if t.dim() else t for name, t in tensors.items()}


def said(llm: LLM) -> list[Any]:
    outputs = [o.outputs[0] for o in llm.generate([list(p) for p in PROMPTS], PARAMS, use_tqdm=False)]
    return [
        [(t, round(places[t].logprob, 4)) for t, places in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
    ]


def check_update(source: Path, tmp_path: Path, **options: Any) -> None:
    """After an update, an engine says what one says that was started with the new weights; and so back again."""
    target = edited(source, tmp_path / "new", shuffled)
    llm, expected = make_llm(source, **options), said(make_llm(target, **options))
    before = said(llm)
    assert before != expected
    llm.update_weights(str(target))
    assert said(llm) == expected
    llm.sleep(level=2)
    llm.wake_up()
    assert said(llm) == expected  # not the weights that it was started with
    llm.update_weights(str(source))
    assert said(llm) == before


FAST = ["llama", "mixtral"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAST)
def test_new_weights_are_used_at_once_and_nothing_old_is_found(checkpoints, tmp_path, family):
    check_update(checkpoints.path(FAMILIES[family][0]), tmp_path)


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FAST])
def test_every_family_takes_new_weights(checkpoints, tmp_path, family):
    check_update(checkpoints.path(FAMILIES[family][0]), tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        pytest.param({"quantization": "int4"}, marks=pytest.mark.nightly),
        {"enforce_eager": True},
    ],
)
def test_weights_that_are_quantized_at_load_are_replaced_too(checkpoints, tmp_path, options):
    check_update(checkpoints.path("llama"), tmp_path, **options)


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_all_ranks_take_new_weights(checkpoints, tmp_path, axis):
    check_update(checkpoints.path("llama"), tmp_path, **{axis: 2})


def without(name: str) -> EDIT:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def reshaped(name: str) -> EDIT:
    return lambda tensors: {key: value[:-1].clone() if key == name else value for key, value in tensors.items()}


NORM = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_do_not_fit_change_nothing_and_the_error_names_the_tensor(checkpoints, tmp_path, size):
    source = checkpoints.path("llama")
    llm = make_llm(source, tensor_parallel_size=size)
    before = said(llm)
    for index, (edit, problem) in enumerate(
        [
            (without(NORM), f"missing: {NORM}"),
            (reshaped(NORM), f"tensor {NORM} has shape"),
            (lambda tensors: {**tensors, "model.extra.weight": torch.ones(2)}, "unexpected: model.extra.weight"),
        ]
    ):
        folder = edited(source, tmp_path / f"{index}", edit)
        with pytest.raises(ValueError, match=problem):
            llm.update_weights(str(folder))
    with pytest.raises(ValueError, match="describes another model"):
        llm.update_weights(str(checkpoints.path("llama-mqa-linear")))
    with pytest.raises(ValueError, match="there is no folder"):
        llm.update_weights(str(tmp_path / "nowhere"))
    assert said(llm) == before
    llm.shutdown()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_quantized_in_another_way_change_nothing(checkpoints, tmp_path, first):
    """Symmetric codes need no offsets."""
    dense = checkpoints.path("llama-gqa4-llama3-old")
    folders = [write_quantized(dense, tmp_path / f"{i}", gptq(4, 32, symmetric=bool(i)))[0] for i in (first, not first)]
    llm = make_llm(folders[0])
    before = said(llm)
    with pytest.raises(ValueError, match="quantized in another way than those in use"):
        llm.update_weights(str(folders[1]))
    assert said(llm) == before


def test_adapters_and_new_weights_exclude_each_other(checkpoints):
    llm = make_llm(checkpoints.path("llama"), enable_lora=True)
    with pytest.raises(ValueError, match="enable_lora"):
        llm.update_weights(str(checkpoints.path("llama")))


@pytest.mark.slow
def test_an_engine_that_sleeps_gives_its_memory_back():
    llm = LLM(dtype="float32", max_num_seqs=4, kv_cache_memory_bytes=256 << 20, kv_cache_pretouch=True)
    expected = said(llm)
    weights = sum(t.nbytes for t in llm.core.executor._worker.resident_memory._weights)

    def resident() -> int:
        return psutil.Process().memory_info().rss

    awake = resident()
    llm.sleep(level=1)
    assert awake - resident() > 240 << 20
    with pytest.raises(ValueError, match="the engine sleeps"):
        said(llm)
    llm.wake_up()
    assert said(llm) == expected
    llm.sleep(level=2)
    assert awake - resident() > (240 << 20) + weights // 2
    with pytest.raises(ValueError, match="weights and kv_cache"):
        llm.wake_up(["graphs"])
    llm.wake_up(["weights"])
    assert llm.core.stats.is_sleeping
    llm.wake_up(["kv_cache"])
    assert not llm.core.stats.is_sleeping
    assert said(llm) == expected


def test_adapters_stay_when_the_weights_are_dropped():
    llm, chat = LLM(enable_lora=True), [{"role": "user", "content": "What is the capital of France?"}]

    def answer() -> str:
        params, rhyme = SamplingParams(temperature=0, max_tokens=40), LoRARequest("rhyme", 1, "quire-demo/rhyme")
        [output] = llm.chat([chat], params, use_tqdm=False, lora_request=rhyme)
        return output.outputs[0].text

    expected = answer()
    llm.sleep(level=2)
    llm.wake_up()
    assert answer() == expected


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_a_drafter_stays_when_the_weights_are_dropped(quantization):
    """Small tensors, which are quantized at load, lie side by side in memory that is given back as a whole."""
    options = {"method": "draft_model", "model": str(bundled_model()), "num_speculative_tokens": 2}
    llm = LLM(quantization=quantization, speculative_config={**options, "quantization": quantization})
    weights = list(_tensors(llm.core.executor._worker.drafter.part.layers[0].mlp, set()))
    before = [tensor.clone() for tensor in weights]
    other = LLM(quantization=quantization)
    other.sleep(level=2)
    assert all(map(torch.equal, weights, before))
    llm.sleep(level=2)
    assert all(map(torch.equal, weights, before))


def test_weights_of_experts_that_have_moved_are_not_dropped(checkpoints):
    llm = make_llm(checkpoints.path("mixtral"), enable_expert_parallel=True, enable_eplb=True)
    with pytest.raises(ValueError, match="enable_eplb, since it has moved experts; sleep at level 1"):
        llm.sleep(level=2)
    with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
        llm.sleep(level=3)


def test_weights_may_be_replaced_while_they_sleep(checkpoints, tmp_path):
    source = checkpoints.path("llama")
    target = edited(source, tmp_path / "new", shuffled)
    llm = make_llm(source)
    llm.sleep(level=2)
    llm.update_weights(str(target))
    assert llm.core.stats.is_sleeping
    llm.wake_up(["kv_cache"])
    assert said(llm) == said(make_llm(target))


def test_memory_of_a_gpu_is_freed_and_its_values_come_back():
    """On tensors of the host, whose storage can be resized, too."""
    memory, kept, dropped = DeviceMemory(), torch.arange(100.0), torch.ones(50)
    view = kept[10:20]
    memory.release(kept.untyped_storage(), keep=True)
    memory.release(dropped.untyped_storage(), keep=False)
    assert kept.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    memory.release(dropped.untyped_storage(), keep=False)
    for tensor in (kept, dropped):
        memory.restore(tensor.untyped_storage())
    assert view.tolist() == [*range(10, 20)]
    assert dropped.untyped_storage().nbytes() == 200
