"""A model whose layers are divided among stages says what the whole one says.

Most divisions are tried with ranks that are threads; a few with real processes, which cost seconds each.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from quire.config.engine import ConfigError
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.lora.files import LoRARequest
from quire.messages.sampling_params import SamplingParams
from quire.parallel.sizes import balanced
from quire.scheduler.scheduler import Scheduler
from support.adapters import OPTIONS, adapted_tokens, check, modules_of, write_adapter
from support.drafters import Drafters
from support.engines import GREEDY, MAX_MODEL_LEN, assert_preempted, generate, make_llm, tokens_of
from support.grammars import automaton_gate, grammar
from support.proposers import TARGET, speculate, target_options
from support.reference import LENGTHS, prompts
from support.staged_ranks import StagedExecutor

pytestmark = pytest.mark.texts


def staged(path: Any, stages: int, ranks: int = 1, **options: Any) -> LLM:
    """An engine whose ranks are threads."""
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        return make_llm(path, pipeline_parallel_size=stages, tensor_parallel_size=ranks, **options)


def processes(path: Any, stages: int, **options: Any) -> LLM:
    return make_llm(path, pipeline_parallel_size=stages, **options)


def test_stages_are_refused_if_all_layers_read_the_values_of_the_first(checkpoints):
    with pytest.raises(ValueError, match=r"pipeline_parallel_size .* layers that all read the values of the first one"):
        staged(checkpoints.path("rwkv7"), 2)


SEVERAL = [
    ("llama-gqa2-tied-llama3", 3, 1),  # the last stage has the table, too
    ("llama", 3, 2),
    ("opt-post-norm-projections", 2, 2),
    ("qwen3-mixed-windows-biases", 4, 1),  # a stage for each layer
    ("deepseek_v3", 3, 1),
    ("gpt_oss", 2, 3),
    ("glm_moe_dsa-shared-selections", 2, 1),  # pairs of layers that attend to the same tokens
]


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("variant", "stages", "ranks"),
    [
        ("gemma3", 2, 2),  # groups with entries of all stages
        *(pytest.param(*case, marks=pytest.mark.sampled(6)) for case in SEVERAL),
    ],
)
def test_stages_of_several_ranks_give_the_tokens_of_transformers(checkpoints, references, variant, stages, ranks):
    expected = references.continuations(variant)[: len(LENGTHS)]
    made = tokens_of(generate(staged(checkpoints.path(variant), stages, ranks), [c.prompt for c in expected]))
    for continuation, token_ids in zip(expected, made, strict=True):
        continuation.check(token_ids)


@pytest.mark.sampled(5)
@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize(("variant", "blocks"), [("mistral-window-20", 12), ("qwen3-mixed-windows-biases", 24)])
def test_all_features_at_once_change_nothing(checkpoints, variant, blocks, stages, ranks):
    """Chunks, preemption in a tiny pool, cached prefixes, windows, seeds, n, stop strings in one batch."""
    plain = make_llm(checkpoints.path(variant))
    texts = prompts(320, 6)
    text = generate(plain, texts[:1])[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = [
        SamplingParams(temperature=0.9, seed=11, n=3, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        GREEDY.clone(stop=[stop], presence_penalty=0.5),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True),
    ]
    requests = [(text, param) for text in texts for param in params]
    expected = [generate(plain, [text], [param])[0] for text, param in requests]
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_gpu_blocks_override": blocks}
    llm = staged(checkpoints.path(variant), stages, ranks, **limits)
    outputs = generate(llm, [text for text, _ in requests], [param for _, param in requests])
    assert_preempted(llm)
    assert [[(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in outputs] == [
        [(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in expected
    ]


def test_stages_are_chosen_so_that_the_slowest_one_is_as_fast_as_possible():
    assert balanced([1] * 8, 2) == [4, 4]
    assert balanced([1] * 7 + [3], 2) == [5, 3]
    assert balanced([5, 1, 1, 1, 1, 1], 3) == [1, 2, 3]
    assert balanced([1] * 12 + [4], 4) == [4, 4, 4, 1]
    assert balanced([1, 2, 3], 3) == [1, 1, 1]
    assert balanced([1] * 5, 1) == [5]
    with pytest.raises(ValueError, match="pipeline_parallel_size=4 is too large: the model can have 3 stages"):
        balanced([1, 1, 1], 4)


def test_stages_can_be_given(checkpoints):
    path = checkpoints.path("qwen3-mixed-windows-biases")
    runners = staged(path, 2, pipeline_layers=[1, 3]).core.executor.runners
    assert [runner.model.stage.layers for runner in runners] == [range(1), range(1, 4)]
    with pytest.raises(ConfigError, match=r"must add up to the model's 4 layers, .* got \[1, 2\]"):
        staged(path, 2, pipeline_layers=[1, 2])
    with pytest.raises(ConfigError, match=r"a number for each of the pipeline_parallel_size=2 stages, got \[4\]"):
        staged(path, 2, pipeline_layers=[4])


def test_layers_that_share_a_selection_are_in_one_stage(checkpoints):
    path = checkpoints.path("glm_moe_dsa-shared-selections")
    runners = staged(path, 2).core.executor.runners
    assert [runner.model.stage.layers for runner in runners] == [range(2), range(2, 4)]
    with pytest.raises(ConfigError, match="pipeline_layers: layer 1 attends to the tokens that the layer before"):
        staged(path, 2, pipeline_layers=[1, 3])


CHECKED = [
    pytest.param("ngram", {}, marks=pytest.mark.sampled(4)),
    pytest.param("Mixed", {}, marks=pytest.mark.sampled(4)),
    ("Perfect", {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 40}),
]


@pytest.mark.sampled(3)
@pytest.mark.plain("it has drafts of its own")
@pytest.mark.parametrize(("proposer", "options"), CHECKED)
def test_drafts_are_verified_on_the_last_stage(checkpoints, proposer, options):
    path, texts = checkpoints.path("llama"), prompts(320, 9)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]
    expected = tokens_of(generate(make_llm(path), texts, params))
    os.environ[TARGET] = target_options({"model": str(path), "dtype": "float32", "max_model_len": MAX_MODEL_LEN})
    llm = staged(path, 2, speculative_config=speculate(proposer), max_num_seqs=6, **options)
    assert tokens_of(generate(llm, texts, params)) == expected
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.accepted_tokens > 0


@pytest.mark.sampled(3)
@pytest.mark.plain("it has drafts of its own")
@pytest.mark.parametrize("kind", ["similar", "medusa", "eagle"])
def test_drafters_run_behind_the_last_stage(checkpoints, tmp_path_factory, kind):
    drafters, texts = Drafters(checkpoints, tmp_path_factory), prompts(320, 9)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]
    path = drafters.target("llama")
    expected = tokens_of(generate(make_llm(path), texts, params))
    llm = staged(path, 2, speculative_config=drafters.config(kind, "llama"), max_num_seqs=6)
    assert tokens_of(generate(llm, texts, params)) == expected
    assert llm.core.stats.speculation.draft_tokens > 100


@pytest.mark.nightly
def test_a_drafter_that_reads_earlier_layers_is_refused(checkpoints, tmp_path_factory):
    drafters = Drafters(checkpoints, tmp_path_factory)
    config = drafters.config("eagle3", "llama")
    with pytest.raises(ValueError, match="a drafter that reads layers of other stages"):
        processes(drafters.target("llama"), 3, speculative_config=config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [3, pytest.param(2, marks=pytest.mark.sampled(4))])
def test_grammars(checkpoints, stages):
    """Several steps with constrained requests are in flight."""
    path, texts = checkpoints.path("llama"), prompts(320, 9)
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=20, structured_outputs=grammar(i) if i % 3 else None)
        for i in range(9)
    ]
    said = []
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    for llm in make_llm(path, **limits), staged(path, stages, **limits):
        _, gate = automaton_gate()
        old, kv = llm.core.scheduler, llm.core.executor.kv_cache
        scheduler = Scheduler(old.limits, kv.num_blocks, list(kv.specs), 16, grammars=gate, vocab_size=320)
        llm.core = EngineCore(scheduler, llm.core.executor)
        outputs = [o.outputs[0] for o in generate(llm, texts, params)]
        said.append([(output.token_ids, output.finish_reason) for output in outputs])
    assert said[0] == said[1]


@pytest.mark.nightly
@pytest.mark.parametrize("make", [staged, pytest.param(processes, marks=pytest.mark.slow)])
def test_adapters_are_divided_like_the_layers(checkpoints, tmp_path, make):
    base, texts = checkpoints.path("llama"), prompts(300, 10)
    llm = make_llm(base, **OPTIONS)
    adapters = [write_adapter(tmp_path / f"a{i}", modules_of(llm), rank=4, seed=i) for i in range(3)]
    chosen = [adapters[i % 3] if i % 4 else None for i in range(10)]
    expected = adapted_tokens(llm, texts, chosen)
    on_stages = make(base, 2, **OPTIONS)
    try:
        check(adapted_tokens(on_stages, texts, chosen), expected)
        for name, size in (("model.layers.0.mlp.up_proj", (64, 64)), ("model.layers.9.mlp.up_proj", (64, 160))):
            bad = write_adapter(tmp_path / "bad", {name: size})
            with pytest.raises(ValueError, match="cannot be used"):
                on_stages.generate(texts[:1], lora_request=LoRARequest("bad", 9, str(bad)))
    finally:
        on_stages.shutdown()


# ---- processes


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (2, 2)])
def test_processes_say_what_one_does(checkpoints, references, stages, ranks):
    expected = references.continuations("llama")[:16]
    blocks = make_llm(checkpoints.path("llama")).core.scheduler.kv.max_blocks(MAX_MODEL_LEN) + 30
    llm = make_llm(
        checkpoints.path("llama"),
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=40,
    )
    most_in_flight, sample = 0, llm.core.executor.sample

    def counted(step_id: int, masks: Any = None) -> Any:
        nonlocal most_in_flight
        result = sample(step_id, masks)
        most_in_flight = max(most_in_flight, len(llm.core._flights) + 1)
        return result

    llm.core.executor.sample = counted  # type: ignore[method-assign]
    try:
        made = tokens_of(generate(llm, [c.prompt for c in expected]))
        for continuation, token_ids in zip(expected, made, strict=True):
            continuation.check(token_ids)
        assert most_in_flight == stages + 1
    finally:
        llm.shutdown()
