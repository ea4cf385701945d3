"""Threads and the size of steps follow from the profile of a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config.engine import ModelConfig
from quire.models.description import describe
from quire.models.parameters import parameters_of
from quire.worker.machine_defaults import Estimate, Work, tokens_of_a_step, work_of
from support.gguf_files import write_gguf
from support.machine_profiles import profile

WORK = Work("dense", 10**9, 10**8, 28)


def estimate(work: Work = WORK, **machine: object) -> Estimate:
    return Estimate(profile(**machine), work)  # type: ignore[arg-type]


@pytest.mark.parametrize(("best", "chunk"), [(128, 512), (512, 512), (1024, 1024), (2048, 2048)])
def test_a_step_is_longer_where_products_become_faster(best, chunk):
    assert estimate(best=best).chunk() == chunk


@pytest.mark.parametrize(
    ("slower", "noise", "chunk"), [(1.01, 0.0, 512), (1.04, 0.0, 256), (1.04, 0.03, 512), (1.08, 0.03, 256)]
)
def test_a_step_is_shorter_where_products_become_clearly_slower(slower, noise, chunk):
    machine = profile(best=256, noise=noise)
    rates = {rows: rate / slower if rows > 256 else rate for rows, rate in machine.rates["dense"][2].items()}
    assert Estimate(replace(machine, rates={"dense": {2: rates}}), WORK).chunk() == chunk


def test_a_longer_step_pays_where_calls_take_long():
    small = Work("dense", 10**7, 10**6, 28)  # 512 tokens: 51 ms of products, and 0.3 or 3.4 ms of calls
    assert estimate(small).chunk() == 512
    assert estimate(small, call=1e-5).chunk() == 1024
    assert estimate(call=1e-5).chunk() == 512


@pytest.mark.parametrize("threads", [1, 2, 6, 64])
def test_threads_that_help_are_used(threads):
    assert estimate(threads=threads).threads() == threads
    assert estimate(threads=threads, speedup=0).threads() == 1


@pytest.mark.parametrize(
    ("speedup", "noise", "threads"), [(0.02, 0.0, 1), (0.02, 0.02, 2), (0.0, 0.02, 1), (0.0, 0.04, 2)]
)
def test_fewer_threads_must_be_clearly_enough(speedup, noise, threads):
    assert estimate(speedup=speedup, noise=noise).threads() == threads


def test_reading_and_multiplying_both_count():
    alone = profile(2)
    rates = {1: {1: 1e10, 512: 1e11}, 2: {**alone.rates["dense"][2], 1: 1e10}}  # twice the products, no more bytes
    assert Estimate(replace(alone, rates={"dense": rates}), WORK).threads() == 2
    rates[2][512] = 1.01e11
    assert Estimate(replace(alone, rates={"dense": rates}), WORK).threads() == 1


def test_a_small_model_has_fewer_threads_where_handing_work_over_takes_long():
    machine = profile(64)
    machine = replace(machine, calls={count: 1e-6 * count for count in machine.calls})
    assert Estimate(machine, Work("dense", 10**10, 10**9, 40)).threads() == 64
    assert Estimate(machine, Work("dense", 10**7, 10**6, 20)).threads() == 8  # one stream: 4; prompts: 16


def test_a_step_of_a_given_time_has_as_many_tokens_as_fit():
    machine = estimate(threads=1)
    assert machine.tokens_within(machine.seconds(300)) == pytest.approx(300, abs=1)
    assert machine.tokens_within(1e-6) == 0
    assert machine.tokens_within(1e6) == 2048


@pytest.mark.parametrize("changes", [{"noise": 0.5}, {"share": 0.5}, {"calls": {}}, {"rates": {}}])
def test_a_profile_of_a_busy_machine_or_without_all_figures_is_not_used(changes):
    assert estimate().is_usable
    assert not estimate(**changes).is_usable


def test_long_steps_that_were_too_slow_to_be_measured_are_not_chosen():
    machine = profile(1, best=2048)
    rates = {rows: rate for rows, rate in machine.rates["dense"][1].items() if rows <= 512}
    short = Estimate(replace(machine, rates={"dense": {1: rates}}), WORK)
    assert short.is_usable
    assert short.chunk() == 512


@pytest.mark.parametrize(
    ("chunk", "seqs", "tokens"), [(128, 64, 192), (128, 256, 384), (512, 256, 512), (512, 600, 728)]
)
def test_a_step_has_room_for_prompts_beside_all_streams(chunk, seqs, tokens):
    assert tokens_of_a_step(chunk, seqs) == tokens


def test_work_is_that_of_the_model(checkpoints, tmp_path: Path):
    path = checkpoints.path("llama")
    described = describe(path, ModelConfig(str(path)))
    work = work_of(described.spec, described.config, None, path)
    counted = parameters_of(described.spec)
    assert work.parameters == counted.rest
    assert (work.kind, work.output, work.layers) == ("dense", counted.output, described.spec.num_layers)
    gguf = write_gguf(path, tmp_path / "model.gguf", "Q8_0")
    kinds = [
        (described.config, "int8", path, "int8"),
        (described.config, "int4", path, "int4"),
        ({}, None, gguf, "int4"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, path, "int8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, path, "int4"),
    ]
    for config, quantization, place, kind in kinds:
        assert work_of(described.spec, config, quantization, place).kind == kind
