"""What ranks send: the formulas of benchmarks/bytes_of_axes.py say what real layers do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.layers.moe import MoE
from quire.layers.specs import MoESpec
from quire.models.registry import spec_of
from quire.parallel.experts import ExpertRanks
from support.layers import build_layer, draw
from support.thread_group import ThreadGroup, on_every_rank

PATH = Path(__file__).parents[2] / "benchmarks" / "bytes_of_axes.py"
TOKENS = 8


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("bytes_of_axes", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bytes_of_axes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.sampled(5)
@pytest.mark.parametrize("axes", [(2,), (4,), (2, True), (4, True)])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B", "Falcon-7B"])
def test_a_tensor_group_sends_what_the_formula_says(bench, model, axes):
    config, axes = bench.small(bench.MODELS[model]), bench.Axes(*axes)
    spec = spec_of(config)
    expected = bench.layer(spec, 0, axes) * spec.num_layers + bench.ends(spec, axes)
    counted, elsewhere = bench.count(config, axes, TOKENS)
    assert counted == bench.Sent(expected.calls, expected.values * TOKENS)
    assert elsewhere == bench.Sent()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [(1, False, 3), (2, False, 3), (4, True, 3)])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Falcon-7B"])
def test_a_stage_in_the_middle_does_too(bench, model, axes):
    config, axes = bench.small(bench.MODELS[model]), bench.Axes(*axes)
    spec = spec_of(config)  # of three layers, so a stage has one
    expected = bench.layer(spec, 0, axes) + bench.boundary(spec, axes)
    to_group, to_stages = bench.count(config, axes, TOKENS, stage=1)
    assert to_group + to_stages == bench.Sent(expected.calls, expected.values * TOKENS)
    assert to_stages == bench.Sent(1, spec.hidden_size * TOKENS / axes.tp)


def test_two_norms_of_a_shared_residual_are_gathered_both(bench):
    config = {**bench.SMALL, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.25, "use_parallel_residual": True}
    spec, axes = spec_of(config), bench.Axes(4, True)
    expected = bench.layer(spec, 0, axes) * 3 + bench.ends(spec, axes)
    assert bench.count(config, axes, TOKENS)[0] == bench.Sent(expected.calls, expected.values * TOKENS)
    assert bench.layer(spec, 0, axes).calls == 3


def test_replicas_that_share_experts_send_what_the_formula_says(bench):
    hidden, size, names = 16, 4, {key: key for key in ("router", "expert_gate", "expert_up", "expert_down")}
    names = {key: f"{name}.{{e}}" if key != "router" else name for key, name in names.items()}
    spec, tokens = MoESpec(8, 3, 12), [draw(f"tokens {rank}", 50, hidden) for rank in range(size)]

    def work(group: ThreadGroup) -> tuple[list[int], torch.Tensor]:
        ranks = ExpertRanks(group, replicated=False)
        layer, _ = build_layer(lambda builder: MoE(builder, spec, hidden, names), experts=ranks)
        layer(tokens[group.rank])
        _, chosen = layer.kernels.choose_experts(layer.router(tokens[group.rank]), None, layer.routing)
        return group.bytes_sent[1:], chosen // 2  # the rank of each chosen expert

    made = on_every_rank(size, work)
    ranks = [[len(set(row) - {rank}) for row in chosen.tolist()] for rank, (_, chosen) in enumerate(made)]
    away = sum(int((chosen != rank).sum()) for rank, (_, chosen) in enumerate(made))
    expected = bench.exchange(spec, hidden, sum(map(sum, ranks)), away)
    assert sum(sum(sent) for sent, _ in made) == 4 * expected.values
    assert {len(sent) + 1 for sent, _ in made} == {expected.calls}
    likely = bench.expected_exchange(spec, hidden, size)
    assert likely.values * 200 == pytest.approx(expected.values, rel=0.1)


def test_the_table_of_a_real_model(bench):
    first, *_ = bench.rows(spec_of(bench.MODELS["Llama-3.1-8B"]), 4)
    sent = 2 * 2 * 4096 * 3 // 4 * 2  # two all-reduces of 4096 elements of two bytes, in a ring of four
    assert first.startswith(f"| tp, 4 ranks | 2 a layer | {sent:,} | 64 | {32 * sent // 1024} | 2 all-reduces")
