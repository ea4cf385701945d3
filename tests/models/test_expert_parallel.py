"""Models whose experts are dealt to ranks say what transformers says, with ranks and cores that are threads."""

from __future__ import annotations

from typing import Any

import pytest
from test_tensor_parallel import RankedExecutor

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.assemble import scheduler_limits
from quire.engine.core import EngineCore
from quire.messages.engine import EngineCoreRequest
from quire.ops.registry import OPS
from quire.parallel.experts import StepCapacity
from quire.parallel.step_halves import Halves
from quire.scheduler.scheduler import Scheduler
from support.checkpoints import ALL_VARIANTS
from support.engines import GREEDY, MAX_MODEL_LEN, generate, make_llm, tokens_of
from support.families.experts import EXPERTS as FIRST_EXPERTS
from support.families.mixtures import MIXTURES
from support.families.published import PUBLISHED
from support.families.recent import RECENT_EXPERTS
from support.families.rms_norm import RMS_NORM
from support.families.states import STATES
from support.reference import LENGTHS
from support.shared_experts import SharedExperts
from support.ways import FIRST

pytestmark = pytest.mark.texts

COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
OTHER_FAMILIES = {name: v for name, v in {**RMS_NORM, **STATES, **PUBLISHED}.items() if COUNTS & v[1].keys()}
EXPERTS = {**FIRST_EXPERTS, **RECENT_EXPERTS, **MIXTURES, **OTHER_FAMILIES}
FIRST_WITH_EXPERTS = [variant for variant in FIRST if variant in EXPERTS]
FIRST_WITH_EXPERTS += ["gemma4-experts", "granitemoehybrid-experts", "nemotron_h-experts"]
HALVES = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}
OTHERS = [variant for variant in EXPERTS if variant not in FIRST]


def options(path: Any, **more: Any) -> EngineConfig:
    small = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, "enable_expert_parallel": True}
    return EngineConfig.create(model=str(path), **{**small, **more})


def shared(checkpoints: Any, references: Any, variant: str, **more: Any) -> SharedExperts:
    """Two replicas or more, among which the prompts are divided unequally: all but the first have only one.

    If steps are to be divided, the prompts are divided equally, since no replica may have a single token then.
    """
    replicas = SharedExperts(
        options(checkpoints.path(variant), **{"data_parallel_size": 2, **more}), checkpoints.path(variant)
    )
    expected, count = references.continuations(variant)[: len(LENGTHS)], len(replicas.cores)
    numbers = range(len(expected))
    dealt = [[i for i in numbers if min(i, count - 1) == count - 1 - core] for core in range(count)]
    if more.get("enable_dbo"):
        dealt = [[*numbers[core::count]] for core in range(count)]

    def requests(numbers: list[int]) -> list[EngineCoreRequest]:
        return [EngineCoreRequest(f"{i}", expected[i].prompt, GREEDY, seed=0, max_tokens=64) for i in numbers]

    for results in (replicas.run([requests(numbers) for numbers in dealt]) for _ in range(2)):
        for made in results:
            for name, token_ids in made.items():
                expected[int(name)].check(token_ids)
        assert sorted(name for made in results for name in made) == sorted(map(str, range(len(expected))))
    assert len({waves.steps for waves in replicas.waves}) == 1
    assert all(waves.dummies for waves in replicas.waves)
    return replicas


@pytest.mark.sampled(16)
@pytest.mark.parametrize("variant", FIRST_WITH_EXPERTS)
def test_replicas_that_share_experts(checkpoints, references, variant):
    """They run together until none has work, pause, and run again."""
    shared(checkpoints, references, variant)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("mixtral", {"data_parallel_size": 3}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("deepseek_v3", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"max_num_batched_tokens": 24, "max_num_seqs": 12, "num_gpu_blocks_override": 24}),
        ("qwen3_moe", {"async_scheduling": True}),
        ("deepseek_v3", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **HALVES}),
        ("deepseek_v3", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, **HALVES}),
        ("gpt_oss", {"data_parallel_size": 3, "max_num_batched_tokens": 24, "max_num_seqs": 12, **HALVES}),
    ],
)
def test_replicas_that_share_experts_together_with(checkpoints, references, variant, more):
    replicas = shared(checkpoints, references, variant, **more)
    if "num_gpu_blocks_override" in more:
        assert any(core.scheduler.stats.preemptions for core in replicas.cores)


FIXED = {"all2all_backend": "allgather_reducescatter"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"data_parallel_size": 3, "tensor_parallel_size": 2}),
        ("deepseek_v3", {"pipeline_parallel_size": 2}),
        ("gpt_oss", {}),
        ("nemotron_h-experts", {}),
        ("qwen3_moe", {"async_scheduling": True}),
        ("qwen3_moe", HALVES),
    ],
)
def test_replicas_that_exchange_tokens_with_a_fixed_capacity(checkpoints, references, variant, more, monkeypatch):
    """Small steps have a fixed capacity, and larger ones are exchanged by counts."""
    monkeypatch.setattr(StepCapacity.__init__, "__defaults__", (12,))
    agreed = []
    agree = StepCapacity.agree
    monkeypatch.setattr(StepCapacity, "agree", lambda self, *step: (agree(self, *step), agreed.append(self.tokens))[0])
    shared(checkpoints, references, variant, **FIXED, **more)
    assert 0 in agreed
    assert any(agreed)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", OTHERS)
def test_other_variants_of_replicas_that_share_experts(checkpoints, references, variant):
    shared(checkpoints, references, variant)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", EXPERTS)
@pytest.mark.parametrize(("replicas", "ranks", "stages"), [(2, 2, 1), (2, 1, 2), (3, 1, 1), (2, 2, 2), (4, 1, 1)])
def test_all_meshes(checkpoints, references, variant, replicas, ranks, stages):
    sizes = {"data_parallel_size": replicas, "tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    shared(checkpoints, references, variant, **sizes)


@pytest.mark.sampled(44)
@pytest.mark.slow
@pytest.mark.parametrize("kernels", [{}, dict.fromkeys(OPS, "reference")])
@pytest.mark.parametrize("variant", FIRST_WITH_EXPERTS)
def test_halves_of_a_step_that_take_turns_change_nothing(checkpoints, references, variant, kernels, monkeypatch):
    """Not every step is divided: a replica may have one token only."""
    divided = []
    monkeypatch.setattr(Halves, "run", lambda *args, run=Halves.run: divided.append(1) or run(*args))
    attention = {"attention_backend": "reference"} if kernels else {}
    shared(checkpoints, references, variant, **HALVES, kernels=kernels, **attention)
    assert divided


BALANCED = {"enable_eplb": True, "eplb_config": {"step_interval": 8, "window_size": 6, "num_redundant_experts": 2}}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("variant", FIRST_WITH_EXPERTS)
def test_experts_move_between_replicas_while_texts_are_made(checkpoints, references, variant):
    replicas = shared(checkpoints, references, variant, **BALANCED)
    executors: list[Any] = [core.executor for core in replicas.cores]
    balancers = [executor.runners[0].balancer for executor in executors]
    found = [[layer.dispatch.slots.experts for layer in balancer.layers] for balancer in balancers]
    assert found[0] == found[1]
    count = balancers[0].layers[0].spec.num_experts
    assert all(set(slots) == set(range(count)) for slots in found[0])
    assert any(slots[:count] != list(range(count)) for slots in found[0])


@pytest.mark.slow
def test_experts_move_between_the_ranks_of_a_tensor_group(checkpoints):
    path, prompts = checkpoints.path("qwen3_moe"), [[5, 7, 9], [11, 3], [8] * 40]
    llm = make_llm(path)
    expected = tokens_of(generate(llm, prompts))
    executor = RankedExecutor(path, 2, enable_expert_parallel=True, **BALANCED)
    kv = executor.kv_cache
    scheduler = Scheduler(scheduler_limits(llm.config, MAX_MODEL_LEN), kv.num_blocks, list(kv.specs), kv.block_size)
    llm.core = EngineCore(scheduler, executor)
    assert tokens_of(generate(llm, prompts)) == expected
    first = executor.runners[0].balancer.layers[0].dispatch
    assert first.slots.experts != [*range(8), 0, 1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("quantization", "more"),
    [
        ("int8", BALANCED),
        ("int4", {}),
        pytest.param("int8", {}, marks=pytest.mark.sampled(4)),
        pytest.param("int4", BALANCED, marks=pytest.mark.sampled(4)),
    ],
)
def test_quantized_experts_are_dealt_as_they_are(checkpoints, quantization, more):
    """Each expert is whole on its rank, so two ranks say what one says with the same weights."""
    path, prompts = checkpoints.path("qwen3_moe"), [[5, 7, 9], [11, 3], [8] * 40]
    plain = make_llm(path, quantization=quantization)
    expected = tokens_of(generate(plain, prompts, GREEDY.clone(max_tokens=24)))
    replicas = SharedExperts(options(path, data_parallel_size=2, quantization=quantization, **more), path)
    requests = [EngineCoreRequest(f"{i}", p, GREEDY, seed=0, max_tokens=24) for i, p in enumerate(prompts)]
    first, second = replicas.run([requests[:2], requests[2:]])
    assert [first["0"], first["1"], second["2"]] == expected


def test_a_model_without_experts_is_refused(checkpoints):
    path = checkpoints.path("llama")
    with pytest.raises(ConfigError, match="enable_expert_parallel cannot be used with a model that has no experts"):
        make_llm(path, enable_expert_parallel=True)


def test_every_family_with_experts_is_tested():
    with_experts = {kind for variant, (kind, *_) in ALL_VARIANTS.items() if "expert" in str(ALL_VARIANTS[variant][1])}
    assert {ALL_VARIANTS[variant][0] for variant in FIRST_WITH_EXPERTS} == with_experts
