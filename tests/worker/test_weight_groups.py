"""Weights that a trainer sends by a process group to an LLM in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_residence import edited, said, shuffled

from quire.engine.llm import LLM
from support.checkpoints import FAMILIES
from support.engines import make_llm
from support.trainer import Trainer, described
from support.waiting import LONGEST

NORM = "model.layers.1.mlp.down_proj.weight"


def check_update(source: Path, tmp_path: Path, ranks: int = 1, buckets: int = 1, **options: Any) -> None:
    """After an update, an engine says what one says that was started with the new weights; and so back again."""
    target = edited(source, tmp_path / "new", shuffled)
    llm, expected = make_llm(source, **options), said(make_llm(target, **options))
    before = said(llm)
    assert before != expected
    with Trainer(1 + ranks) as trainer:
        llm.init_weights_update_group(**trainer.place)
        for folder, answers in ((target, expected), (source, before)):
            names = described(folder)["names"]
            for part in range(buckets):
                fields = trainer.send(folder, names[part::buckets])
                llm.update_weights_from_distributed(**fields, last=part == buckets - 1)
                assert trainer.result == "sent"
            assert said(llm) == answers
    llm.shutdown()


WITH_BUFFERS = ("deepseek_v4",)  # its tables of experts by token are buffers, which trainers do not send


@pytest.mark.parametrize("variant", [pytest.param("llama", marks=pytest.mark.slow), "llama-gqa2-tied-llama3"])
def test_weights_come_from_a_trainer(checkpoints, tmp_path, variant):
    check_update(checkpoints.path(variant), tmp_path, buckets=3)


@pytest.mark.sampled(65)
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("llama", *WITH_BUFFERS)])
def test_every_family_takes_weights_from_a_trainer(checkpoints, tmp_path, family):
    check_update(checkpoints.path(FAMILIES[family][0]), tmp_path)


@pytest.mark.slow
def test_weights_that_are_quantized_at_load_come_from_a_trainer_too(checkpoints, tmp_path):
    check_update(checkpoints.path("llama"), tmp_path, quantization="int8")


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("tensor_parallel_size", marks=pytest.mark.slow),
        pytest.param("pipeline_parallel_size", marks=pytest.mark.nightly),
    ],
)
def test_all_ranks_take_weights_from_a_trainer(checkpoints, tmp_path, axis):
    check_update(checkpoints.path("llama-gqa2-tied-llama3"), tmp_path, ranks=2, buckets=2, **{axis: 2})


def wrong(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Fields with another value for the tensor NORM."""
    place = fields["names"].index(NORM)
    changed = {name: list(values) for name, values in fields.items()}
    for field, value in changes.items():
        changed[field][place] = value
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"names": "model.extra.weight"}, "names: the model's checkpoint has no tensor 'model.extra.weight'"),
        pytest.param(
            {"shapes": [1 << 40, 1 << 20]}, rf"shapes: tensor {NORM} has \[64, 96\], got", marks=pytest.mark.slow
        ),
        pytest.param({"shapes": [-1]}, rf"shapes: tensor {NORM} has \[64, 96\], got \[-1\]", marks=pytest.mark.nightly),
        pytest.param(
            {"dtypes": "int8"},
            f"dtypes: tensor {NORM} should have one of float32, float16, bfloat16, float64, got 'int8'",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_tensors_that_do_not_fit_are_refused_and_the_trainer_is_not_left_waiting(checkpoints, changes, problem, size):
    source = checkpoints.path("llama")
    llm = make_llm(source, tensor_parallel_size=size)
    before = said(llm)
    with Trainer(1 + size) as trainer:
        llm.init_weights_update_group(**trainer.place)
        fields = trainer.send(source)
        with pytest.raises(ValueError, match=problem):
            llm.update_weights_from_distributed(**wrong(fields, **changes))
        assert trainer.result  # whether it has sent, or failed
        with pytest.raises(ValueError, match="there is no group 'weight_update_group'"):
            llm.update_weights_from_distributed(**fields)
    assert said(llm) == before
    llm.shutdown()


@pytest.mark.slow
def test_what_is_missing_is_named_and_the_group_stays(checkpoints, tmp_path):
    source = checkpoints.path("llama")
    target = edited(source, tmp_path / "new", shuffled)
    llm = make_llm(source)
    before = said(llm)
    with Trainer(2) as trainer:
        llm.init_weights_update_group(**trainer.place)
        names = [name for name in described(target)["names"] if name != NORM]
        with pytest.raises(ValueError, match=f"missing: {NORM}"):
            llm.update_weights_from_distributed(**trainer.send(target, names))
        assert said(llm) == before
        with pytest.raises(ValueError, match="missing: "):  # what came before was dropped
            llm.update_weights_from_distributed(**trainer.send(target, [NORM]))
        with pytest.raises(ValueError, match="names, dtypes and shapes should have the same length"):
            llm.update_weights_from_distributed(["a"], [], [[1]])
    assert said(llm) == before


@pytest.mark.nightly
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_trainer_that_dies_leaves_the_old_weights(checkpoints, tmp_path, size):
    source = checkpoints.path("llama")
    target = edited(source, tmp_path / "new", shuffled)
    llm, expected = make_llm(source, tensor_parallel_size=size), said(make_llm(target))
    before = said(llm)
    with Trainer(1 + size) as trainer:
        llm.init_weights_update_group(**trainer.place, timeout=3600)
        fields = trainer.send(target, die_after=5)
        with pytest.raises(ValueError, match=f"tensor {fields['names'][5]} has not come: "):
            llm.update_weights_from_distributed(**fields)
    assert said(llm) == before
    with Trainer(1 + size) as trainer:
        llm.init_weights_update_group(**trainer.place)
        llm.update_weights_from_distributed(**trainer.send(target))
    assert [[t for t, _ in text] for text in said(llm)] == [[t for t, _ in text] for text in expected]
    llm.shutdown()


@pytest.mark.nightly
def test_a_trainer_that_is_silent_or_away_does_not_hold_the_engine_for_ever(checkpoints):
    source = checkpoints.path("llama")
    llm = make_llm(source)
    before = said(llm)
    with Trainer(2) as trainer:
        llm.init_weights_update_group(**trainer.place, timeout=LONGEST)
        llm.destroy_weights_update_group()
        with pytest.raises(ValueError, match="there is no group"):
            llm.update_weights_from_distributed(**described(source))
        with pytest.raises(ValueError, match="was not joined in 1 s"):
            llm.init_weights_update_group("127.0.0.1", trainer.port, world_size=3, timeout=1)  # the other never comes
    with Trainer(2) as trainer:
        llm.init_weights_update_group(**trainer.place, timeout=8)
        with pytest.raises(ValueError, match=f"tensor {described(source)['names'][0]} has not come"):
            llm.update_weights_from_distributed(**described(source))
    with pytest.raises(ValueError, match="was not joined in 1 s"):
        llm.init_weights_update_group("127.0.0.1", trainer.port, world_size=2, timeout=1)
    assert said(llm) == before


@pytest.mark.slow
def test_weights_that_were_dropped_in_sleep_come_from_a_trainer(checkpoints, tmp_path):
    source = checkpoints.path("llama")
    target = edited(source, tmp_path / "new", shuffled)
    llm, expected = make_llm(source), said(make_llm(target))
    with Trainer(2) as trainer:
        llm.init_weights_update_group(**trainer.place)
        for _ in range(2):
            llm.update_weights_from_distributed(**trainer.send(target))
            if llm.core.stats.is_sleeping:
                llm.wake_up(["kv_cache"])
            assert said(llm) == expected
            llm.sleep(level=2)
            with pytest.raises(ValueError, match="send them again"):
                llm.wake_up()
    llm.update_weights(str(source))
    llm.wake_up()
    assert said(llm) == said(make_llm(source))


def test_engines_whose_weights_cannot_be_replaced_join_no_group(checkpoints):
    source = checkpoints.path("llama")
    place = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}
    for options, problem in (({"enable_lora": True}, "enable_lora"), ({"load_format": "dummy"}, "load_format")):
        with pytest.raises(ValueError, match=problem):
            make_llm(source, **options).init_weights_update_group(**place)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"master_address": "example.org"}, "master_address should be an IP address or localhost"),
        ({"master_port": 0}, "master_port should be"),
        ({"rank_offset": 0}, "rank_offset should be at least 1"),
        ({"world_size": 1}, "world_size should be at least 2, since 1 ranks begin at 1"),
        ({"rank_offset": 2}, "world_size should be at least 3"),
        ({"backend": "mpi"}, "backend should be gloo or nccl"),
        ({"backend": "nccl"}, "backend: nccl needs a GPU"),
        ({"timeout": 0}, "timeout should be"),
    ],
)
def test_places_that_have_no_meaning_are_refused(llm: LLM, changes, problem):
    place: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}
    with pytest.raises(ValueError, match=problem):
        llm.init_weights_update_group(**{**place, **changes})


@pytest.fixture(scope="module")
def llm(checkpoints) -> LLM:
    return make_llm(checkpoints.path("llama"), device="cpu")
