"""A model whose contexts are divided among ranks says what the whole one says.

Most divisions are tried with ranks that are threads; a few with real processes, which cost seconds each. These tests
are not marked `texts`, since drafters on the device and prefill context parallelism exclude each other.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
from test_encoders import VARIANTS as ENCODERS
from test_encoders import saved as encoder_checkpoint

from quire.attention.headwise import HeadwiseAttention
from quire.attention.stripes import StripedAttention
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.messages.engine import EngineCoreRequest
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from support.adapters import OPTIONS, adapted_tokens, check, modules_of, write_adapter
from support.checkpoints import ALL_VARIANTS
from support.divisions import DIVISIONS, Division, divided, has_divisible_contexts
from support.drafters import Drafters
from support.engines import GREEDY, MAX_MODEL_LEN, assert_preempted, generate, make_llm, tokens_of
from support.grammars import automaton_gate, grammar
from support.proposers import TARGET, speculate, target_options
from support.reference import LENGTHS, Continuation, prompts
from support.shared_experts import SharedExperts
from support.staged_ranks import StagedExecutor

TRIED = [division for division in DIVISIONS if division != "pcp-2"]


def says(llm: LLM, expected: list[Continuation]) -> None:
    made = tokens_of(generate(llm, [c.prompt for c in expected]))
    for continuation, token_ids in zip(expected, made, strict=True):
        continuation.check(token_ids)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("variant", "division"),
    [
        ("llama", "pcp-2-by-heads"),
        ("llama", "pcp-2-over-stripes"),
        ("llama-gqa4-llama3-old", "dcp-2-of-tp-4"),
        ("llama-mqa-linear", "dcp-2-of-tp-2"),
        ("llama-mqa-linear", "pcp-2-and-dcp-2-of-tp-2"),
        ("mistral-window-20", "pcp-3"),  # a window that does not divide
        ("gemma3", "pcp-2-over-stripes"),  # several KV groups
        ("gemma2", "pcp-2-and-tp-2"),  # soft caps
        ("gpt_oss", "pcp-3"),  # sinks and experts
        ("falcon-rw-6-heads", "pcp-3"),  # ALiBi
        ("deepseek_v2", "pcp-2-and-pp-2"),
        ("deepseek_v3", "pcp-2-and-dcp-2-of-tp-2"),
        pytest.param("deepseek_v3", "dcp-4-of-tp-4", marks=pytest.mark.slow),
        ("deepseek_v32", "dcp-2-of-tp-2"),
        ("glm_moe_dsa-shared-selections", "pcp-3"),
    ],
)
def test_ranks_together_say_what_transformers_says(checkpoints, references, variant, division):
    says(divided(checkpoints.path(variant), division), references.continuations(variant)[: len(LENGTHS)])


def test_contexts_that_cannot_be_divided(checkpoints):
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size cannot be used .* ranks cannot divide"):
        divided(checkpoints.path("llama4"), "pcp-2-over-stripes")


@pytest.mark.nightly
@pytest.mark.parametrize("division", TRIED)
@pytest.mark.parametrize("variant", [variant for variant in ALL_VARIANTS if has_divisible_contexts(variant)])
def test_every_variant_does_so_in_every_division(checkpoints, references, variant, division):
    """At once, with cached prefixes, and in chunks with preemptions."""
    path, expected = checkpoints.path(variant), references.continuations(variant)
    if not DIVISIONS[division].is_possible(path):
        pytest.skip("the model's heads cannot be divided so")
    llm = divided(path, division)
    says(llm, expected)
    says(llm, expected[: len(LENGTHS)])
    assert llm.core.scheduler.stats.prefix_hits > 0
    blocks = llm.core.scheduler.kv.max_blocks(MAX_MODEL_LEN) + 10
    tight = divided(path, division, num_gpu_blocks_override=blocks, max_num_batched_tokens=40)
    says(tight, expected[: len(LENGTHS)])


WINDOWS = [("mistral-window-20", 12), ("qwen3-mixed-windows-biases", 24)]
IN_EACH_RUN = ("mistral-window-20", "pcp-2-over-stripes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "blocks", "division"),
    [
        pytest.param(variant, blocks, division, marks=[] if (variant, division) == IN_EACH_RUN else pytest.mark.nightly)
        for variant, blocks in WINDOWS
        for division in ("pcp-2-by-heads", "pcp-2-over-stripes", "pcp-2-and-pp-2", "dcp-2-of-tp-4")
    ],
)
def test_all_features_at_once_change_nothing(checkpoints, variant, blocks, division):
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
    llm = divided(checkpoints.path(variant), division, **limits)
    outputs = generate(llm, [text for text, _ in requests], [param for _, param in requests])
    assert_preempted(llm)
    assert llm.core.scheduler.stats.prefix_hits > 0
    assert [[(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in outputs] == [
        [(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in expected
    ]


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of the tokens of the prompt and of those behind it."""
    found = []
    for token_ids, logprobs in (
        (output.prompt_token_ids, output.prompt_logprobs),
        (output.outputs[0].token_ids, output.outputs[0].logprobs),
    ):
        found += [of[token].logprob for token, of in zip(token_ids, logprobs, strict=True) if of is not None]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("variant", "division"),
    [
        ("llama", "pcp-2-by-heads"),
        pytest.param("llama", "pcp-3", marks=pytest.mark.sampled(3)),
        pytest.param("deepseek_v3", "pcp-2-and-dcp-2-of-tp-2", marks=pytest.mark.sampled(3)),
        pytest.param("llama-gqa4-llama3-old", "dcp-2-of-tp-4", marks=pytest.mark.sampled(3)),
    ],
)
def test_log_probabilities_are_those_of_one_rank(checkpoints, variant, division):
    path, texts = checkpoints.path(variant), prompts(320, 9)
    params = GREEDY.clone(logprobs=0, prompt_logprobs=0, max_tokens=20)
    expected = generate(make_llm(path), texts, params)
    llm = divided(path, division, max_num_batched_tokens=64)
    for _ in range(2):  # the second time, parts of the prompts are cached
        outputs = generate(llm, texts, params)
        assert tokens_of(outputs) == tokens_of(expected)
        for output, wanted in zip(outputs, expected, strict=True):
            assert logprobs_of(output) == pytest.approx(logprobs_of(wanted), abs=1e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("division", ["pcp-3", "pcp-2-by-heads", "dcp-2-of-tp-4"])
@pytest.mark.parametrize(
    ("proposer", "options"), [("ngram", {}), ("Perfect", {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 40})]
)
def test_drafts_are_verified_by_all_ranks(checkpoints, proposer, options, division):
    path, texts = checkpoints.path("llama-gqa4-llama3-old"), prompts(320, 9)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]
    expected = tokens_of(generate(make_llm(path), texts, params))
    os.environ[TARGET] = target_options({"model": str(path), "dtype": "float32", "max_model_len": MAX_MODEL_LEN})
    llm = divided(path, division, speculative_config=speculate(proposer), max_num_seqs=6, **options)
    assert tokens_of(generate(llm, texts, params)) == expected
    assert llm.core.stats.speculation.accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["similar", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("eagle3", "p-eagle", "medusa"))]
)
def test_drafters_keep_their_own_entries_in_stripes(checkpoints, tmp_path_factory, kind):
    """The draft model, or the head, is divided like the model."""
    drafters, texts, variant = Drafters(checkpoints, tmp_path_factory), prompts(320, 9), "llama-gqa4-llama3-old"
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]
    path = drafters.target(variant)
    expected = tokens_of(generate(make_llm(path), texts, params))
    config = drafters.config(kind, variant)
    if kind == "similar":
        config["draft_tensor_parallel_size"] = 4
    llm = divided(path, "dcp-2-of-tp-4", speculative_config=config, max_num_seqs=6)
    assert tokens_of(generate(llm, texts, params)) == expected
    stats = llm.core.stats.speculation
    assert stats.draft_tokens > 100
    assert kind != "similar" or stats.accepted_tokens > 0.2 * stats.draft_tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("division", ["pcp-3", pytest.param("dcp-2-of-tp-4", marks=pytest.mark.sampled(4))])
def test_grammars(checkpoints, division):
    path, texts = checkpoints.path("llama-gqa4-llama3-old"), prompts(320, 9)
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=20, structured_outputs=grammar(i) if i % 3 else None)
        for i in range(9)
    ]
    said = []
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    for llm in make_llm(path, **limits), divided(path, division, **limits):
        _, gate = automaton_gate()
        old, kv = llm.core.scheduler, llm.core.executor.kv_cache
        scheduler = Scheduler(old.limits, kv.num_blocks, list(kv.specs), kv.block_size, grammars=gate, vocab_size=320)
        llm.core = EngineCore(scheduler, llm.core.executor)
        outputs = [o.outputs[0] for o in generate(llm, texts, params)]
        said.append([(output.token_ids, output.finish_reason) for output in outputs])
    assert said[0] == said[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "division"),
    [
        ("mixtral", "pcp-2"),
        pytest.param("deepseek_v3", "pcp-2-and-dcp-2-of-tp-2", marks=pytest.mark.sampled(4)),
        pytest.param("deepseek_v3", "dcp-2-of-tp-2", marks=pytest.mark.sampled(4)),
    ],
)
def test_experts_are_dealt_to_the_ranks(checkpoints, references, variant, division):
    """With -pcp, ranks with different tokens exchange them."""
    llm = divided(checkpoints.path(variant), division, enable_expert_parallel=True)
    says(llm, references.continuations(variant)[: len(LENGTHS)])


def test_experts_move_between_ranks_that_divide_contexts(checkpoints, references):
    balance = {"step_interval": 8, "window_size": 6, "num_redundant_experts": 2}
    llm = divided(
        checkpoints.path("qwen3_moe"), "pcp-2", enable_expert_parallel=True, enable_eplb=True, eplb_config=balance
    )
    says(llm, references.continuations("qwen3_moe"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "division"),
    [
        ("llama", "pcp-2-and-tp-2"),
        pytest.param("deepseek_v3", "pcp-2-and-dcp-2-of-tp-2", marks=pytest.mark.sampled(4)),
        pytest.param("llama-gqa4-llama3-old", "dcp-2-of-tp-4", marks=pytest.mark.sampled(4)),
    ],
)
def test_ranks_divide_tokens_of_norms_and_contexts(checkpoints, references, variant, division):
    llm = divided(checkpoints.path(variant), division, enable_sequence_parallel=True)
    says(llm, references.continuations(variant)[: len(LENGTHS)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.sampled(4))])
def test_replicas_share_experts_and_each_divides_its_steps(checkpoints, references, ranks):
    """A replica without work computes one token in each step, on one of its ranks."""
    path, expected = checkpoints.path("mixtral"), references.continuations("mixtral")[: len(LENGTHS)]
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, "prefill_context_parallel_size": ranks}
    config = EngineConfig.create(model=str(path), dtype="float32", max_num_seqs=32, **options)
    requests = [EngineCoreRequest(f"{i}", c.prompt, GREEDY, seed=0, max_tokens=64) for i, c in enumerate(expected)]
    replicas = SharedExperts(config, path)
    for results in replicas.run([requests[:-1], requests[-1:]]):
        for name, token_ids in results.items():
            expected[int(name)].check(token_ids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("division", "limits"),
    [
        ("pcp-3", {}),
        pytest.param("pcp-2-and-tp-2", {}, marks=pytest.mark.sampled(4)),
        # In some steps, a rank has as many tokens as there are wanted ones, but not the same.
        ("pcp-2-over-stripes", {"max_num_batched_tokens": 6, "max_num_seqs": 4}),
    ],
)
def test_each_rank_applies_the_adapters_of_its_own_tokens(checkpoints, tmp_path, division, limits):
    base, texts = checkpoints.path("llama"), prompts(300, 10)
    llm = make_llm(base, **OPTIONS)
    adapters = [write_adapter(tmp_path / f"a{i}", modules_of(llm), rank=4, seed=i) for i in range(3)]
    chosen = [adapters[i % 3] if i % 4 else None for i in range(10)]
    expected = adapted_tokens(llm, texts, chosen)
    check(adapted_tokens(divided(base, division, **OPTIONS, **limits), texts, chosen), expected)


def test_decoders_embed_texts_that_ranks_divide():
    texts = [[*range(7, 7 + length)] for length in (1, 2, 3, 30, 90)]

    def embeddings(**options: Any) -> list[Any]:
        llm = LLM(runner="pooling", dtype="float32", **options)
        return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]

    expected = embeddings()
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        for made, wanted in zip(embeddings(prefill_context_parallel_size=2), expected, strict=True):
            assert made == pytest.approx(wanted, abs=1e-5)


# ---- what is chosen, and what is refused


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("variant", "options", "kind"),
    [
        ("llama", Division(2), HeadwiseAttention),  # 4 KV heads
        ("llama", Division(4), HeadwiseAttention),
        ("llama", Division(3), StripedAttention),
        ("llama", Division(2, tp=2), HeadwiseAttention),
        ("llama", Division(2, tp=4), StripedAttention),
        ("llama-mqa-linear", Division(2), StripedAttention),
        ("llama-mqa-linear", Division(1, 2, 2), StripedAttention),
        ("deepseek_v2", Division(2), StripedAttention),
    ],
)
def test_heads_are_divided_where_there_are_enough(checkpoints, variant, options, kind):
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        llm = make_llm(checkpoints.path(variant), **options.options)
    assert {type(backend) for worker in llm.core.executor.workers for backend in worker.plan.backends} == {kind}


@pytest.mark.parametrize(("division", "times"), [("pcp-3", 3), ("dcp-2-of-tp-2", 2), ("pcp-2-by-heads", 2)])
def test_ranks_have_room_for_so_many_times_the_tokens(checkpoints, division, times):
    """Of the same memory on each rank."""
    path, limits = checkpoints.path("llama-mqa-linear"), {"kv_cache_memory_bytes": 1_000_000}
    if division == "pcp-2-by-heads":
        path = checkpoints.path("llama")

    def tokens(llm: LLM) -> int:
        return llm.core.scheduler.kv.pool.num_usable * llm.core.scheduler.kv.block_size

    one = tokens(make_llm(path, tensor_parallel_size=1, **limits))
    assert tokens(divided(path, division, **limits)) == pytest.approx(times * one, rel=0.03)


def test_blocks_of_other_divisions_are_not_found(checkpoints):
    path = checkpoints.path("llama-mqa-linear")
    roots = {make_llm(path).core.scheduler.kv.root}
    for division in ("pcp-2", "pcp-3", "dcp-2-of-tp-2", "pcp-2-and-tp-2", "pcp-2-and-dcp-2-of-tp-2"):
        roots.add(divided(path, division).core.scheduler.kv.root)
    by_heads = [divided(checkpoints.path("llama"), f"pcp-2-{how}") for how in ("by-heads", "over-stripes")]
    roots |= {llm.core.scheduler.kv.root for llm in by_heads}
    assert len(roots) == 8


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        (
            "llama",
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            "decode_context_parallel_size=3 must divide tensor_parallel_size=4",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "KV heads and equally many query heads, which is 1 with tensor_parallel_size=2",
        ),
        (
            "llama-6-heads-over-2",
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "which is 1 with tensor_parallel_size=4",
        ),  # three query heads over two ranks
        (
            "deepseek_v3",
            {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
            "which is 1 with tensor_parallel_size=3",
        ),
        (
            "llama",
            {"prefill_context_parallel_size": 2, "speculative_config": {"method": "medusa", "model": "x"}},
            "prefill_context_parallel_size and drafters on the device",
        ),
        (
            "mixtral",
            {
                "prefill_context_parallel_size": 2,
                "data_parallel_size": 2,
                "enable_expert_parallel": True,
                "enable_dbo": True,
            },
            "enable_dbo and prefill_context_parallel_size exclude each other",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(checkpoints, variant, options, message):
    with (
        mock.patch("quire.executor.choice.MultiprocExecutor", side_effect=AssertionError),
        pytest.raises(ConfigError, match=message),
    ):
        make_llm(checkpoints.path(variant), **options)


def test_encoders_have_no_contexts_to_divide(tmp_path):
    encoder_checkpoint(tmp_path, *ENCODERS["bert"])
    with pytest.raises(
        ConfigError, match="prefill_context_parallel_size cannot be used with a model that has no KV cache"
    ):
        LLM(str(tmp_path), prefill_context_parallel_size=2)


# ---- processes


def processes_say_what_one_does(checkpoints: Any, references: Any, variant: str, division: str, depth: int) -> None:
    """In chunks and with preemptions, `depth` steps in flight."""
    expected, sizes = references.continuations(variant)[:12], DIVISIONS[division]
    plain = make_llm(checkpoints.path(variant))
    stripes = 1 if variant == "llama" else sizes.pcp * sizes.dcp
    blocks = -(-plain.core.scheduler.kv.max_blocks(MAX_MODEL_LEN) // stripes) + 10
    llm = make_llm(
        checkpoints.path(variant),
        async_scheduling=depth == 2,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=40,
        **sizes.options,
    )
    try:
        says(llm, expected)
        assert llm.core.scheduler.limits.depth == depth + (sizes.pp > 1) * 2
    finally:
        llm.shutdown()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variant", "division", "depth"),
    [
        pytest.param("llama", "pcp-2", 2, marks=pytest.mark.slow),
        pytest.param("llama-mqa-linear", "dcp-2-of-tp-2", 1, marks=pytest.mark.nightly),
        pytest.param("llama-gqa4-llama3-old", "dcp-2-of-tp-4", 2, marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "pcp-2-and-dcp-2-of-tp-2", 2, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", "pcp-3", 2, marks=pytest.mark.nightly),
        pytest.param("deepseek_v2", "pcp-2-and-pp-2", 1, marks=pytest.mark.nightly),
    ],
)
def test_processes_say_what_one_does(checkpoints, references, variant, division, depth):
    processes_say_what_one_does(checkpoints, references, variant, division, depth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "division", "depth"),
    [
        ("deepseek_v32", "dcp-2-of-tp-2", 2),
        pytest.param("glm_moe_dsa-shared-selections", "dcp-2-of-tp-4", 1, marks=pytest.mark.nightly),
        pytest.param("deepseek_v32", "pcp-2-and-dcp-2-of-tp-2", 2, marks=pytest.mark.nightly),
    ],
)
def test_processes_select_the_keys_that_one_does(checkpoints, references, variant, division, depth):
    """Sparse attention: the ranks exchange candidates."""
    processes_say_what_one_does(checkpoints, references, variant, division, depth)
