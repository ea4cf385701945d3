"""A model that is split over ranks says what the whole one says.

Most splits are tried with ranks that are threads; a few with real processes, which cost seconds each.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.assemble import scheduler_limits
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.kv.specs import StateSpec
from quire.layers.attention_spec import AttentionSpec, HeadShare
from quire.layers.state_spec import MambaSpec
from quire.messages.changes import Change, TrainerOrder
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from quire.messages.transfers import Transfer
from quire.models.spec import DecoderSpec
from quire.parallel.mesh import Mesh
from quire.scheduler.scheduler import Scheduler
from quire.worker.worker import Worker
from support.checkpoints import Checkpoints, write_checkpoint
from support.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    assert_preempted,
    finish,
    generate,
    logits_of_ranks,
    make_llm,
    runners_of_ranks,
    tokens_of,
)
from support.reference import LENGTHS, References, greedy, load, prompts
from support.thread_group import ThreadGroup, on_every_rank
from support.ways import FIRST

pytestmark = pytest.mark.texts


def worker(path: Any, group: ThreadGroup, **options: Any) -> Worker:
    config = EngineConfig.create(model=str(path), dtype="float32", max_num_seqs=32, **options)
    return Worker(config, path, MAX_MODEL_LEN, Mesh(group.rank, size=group.size, tp=group, ep=group, replica=group))


class RankedExecutor(Executor):
    """Runs each step on ranks that are threads; they must agree."""

    def __init__(self, path: Any, size: int, **options: Any) -> None:
        self.size = size
        self.groups: list[ThreadGroup] = []
        workers = on_every_rank(size, lambda group: (worker(path, group, **options), group))
        self.runners = [w.runner for w, _ in workers]
        self.groups = [group for _, group in workers]
        self.kv_cache = workers[0][0].kv_cache
        assert all(w.kv_cache == self.kv_cache for w, _ in workers)

    def _everywhere(self, name: str, *arguments: Any) -> list[Any]:
        return on_every_rank(self.size, lambda group: getattr(self.runners[group.rank], name)(*arguments))

    def submit(self, step: SchedulerOutput) -> None:
        self._everywhere("submit", step)

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Any:
        from concurrent.futures import Future

        outputs = [read() for read in self._everywhere("sample", step_id, masks)]
        assert all(output == outputs[0] for output in outputs)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(outputs[0])
        return future

    def load_adapter(self, key: str, path: str) -> Any:
        raise ValueError("these ranks have no adapters")

    def change(self, change: Change) -> None:
        raise AssertionError("no test changes the memory of these ranks")

    def exchange(self, order: TrainerOrder) -> Any:
        raise AssertionError("no trainer sends these ranks anything")

    def drop_adapter(self, key: str) -> None:
        """There are none."""

    def transfer(self, order: Transfer) -> Any:
        raise ValueError("there are no tiers here")

    def check(self) -> None:
        """Faults are raised by the other methods."""

    def shutdown(self) -> None:
        """Nothing was started."""


SPLITS = [  # beside those in two and three, which test_matrix.py tries with every family
    ("qwen3_5_text", 4),
    ("llama-gqa4-llama3-old", 4),  # 8 heads over 2 KV heads: two ranks keep the same one
    ("llama-6-heads-over-2", 4),
    ("llama-mqa-linear", 4),  # one KV head for all
    ("qwen3-mixed-windows-biases", 4),
    ("internlm2", 4),  # q, k, v in one tensor, by KV head; two ranks keep the same KV head
    ("olmo3-layer-types", 4),  # with fewer KV heads than ranks, whose keys must count once in the norm
    ("olmo3-layer-types", 8),
    ("falcon-40b", 4),
    ("falcon-rw-6-heads", 4),
    ("cohere-query-key-norms", 4),
    ("mixtral-windows", 4),  # experts of 38 over 4 ranks
    ("gpt_oss-global-first", 4),
    ("gpt_oss", 5),
    ("deepseek_v2-lite", 4),
    ("deepseek_v3", 5),
    ("nemotron-biases", 4),
    ("olmoe-clipped", 4),  # norms over the heads of all ranks, then clipped
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "shares"),
    [
        (8, 4, 2, ["0-4 of 0-2", "4-8 of 2-4"]),
        (8, 2, 4, ["0-2 of 0-1", "2-4 of 0-1", "4-6 of 1-2", "6-8 of 1-2"]),
        (9, 3, 2, ["0-6 of 0-2", "6-9 of 2-3"]),
        (9, 3, 4, ["0-3 of 0-1", "3-6 of 1-2", "6-9 of 2-3", "6-9 of 2-3, a copy"]),
        (5, 1, 3, ["0-2 of 0-1", "2-4 of 0-1", "4-5 of 0-1"]),
        (4, 1, 3, ["0-2 of 0-1", "2-4 of 0-1", "2-4 of 0-1, a copy"]),
        (2, 2, 4, ["0-1 of 0-1", "0-1 of 0-1, a copy", "1-2 of 1-2", "1-2 of 1-2, a copy"]),
    ],
)
def test_which_heads_a_rank_has(heads, kv_heads, size, shares):
    """Each head counts once, and so does each KV head in a sum over the ranks."""
    spec, found, counted = AttentionSpec(64, heads, kv_heads, 8), [], [Counter[int](), Counter[float]()]
    for rank in range(size):
        share = HeadShare.of(spec, ThreadGroup(rank, size))
        h, kv = share.heads, share.kv_heads
        found.append(f"{h.start}-{h.stop} of {kv.start}-{kv.stop}{', a copy' * share.is_copy}")
        if not share.is_copy:
            counted[0].update(h)
            counted[1].update(dict.fromkeys(kv, 1 / share.holders))
    assert found == shares
    assert counted == [dict.fromkeys(range(heads), 1), dict.fromkeys(range(kv_heads), 1.0)]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("variant", "size"), SPLITS)
def test_ranks_together_say_what_transformers_says(checkpoints, references, variant, size):
    executor = RankedExecutor(checkpoints.path(variant), size)
    llm = make_llm(checkpoints.path(variant))
    kv = executor.kv_cache
    scheduler = Scheduler(scheduler_limits(llm.config, MAX_MODEL_LEN), kv.num_blocks, list(kv.specs), kv.block_size)
    llm.core = EngineCore(scheduler, executor)
    expected = references.continuations(variant)[: len(LENGTHS)]
    made = tokens_of(generate(llm, [c.prompt for c in expected]))
    for continuation, token_ids in zip(expected, made, strict=True):
        continuation.check(token_ids)


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("variant", "blocks"), [("mistral-window-20", 10), ("qwen3-mixed-windows-biases", 20)])
def test_all_features_at_once_change_nothing(checkpoints, variant, blocks, ranks):
    """Ranks, chunks, preemption in a tiny pool, cached prefixes, windows, seeds, n, stop strings in one batch."""
    plain = make_llm(checkpoints.path(variant))
    texts = prompts(320, 6)
    text = generate(plain, texts[:1])[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = [
        SamplingParams(temperature=0.9, seed=11, n=3, max_tokens=24, ignore_eos=True),
        GREEDY.clone(stop=[stop]),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=5, max_tokens=40, ignore_eos=True),
    ]
    requests = [(text, param) for text in texts for param in params]
    expected = [generate(plain, [text], [param])[0] for text, param in requests]

    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_gpu_blocks_override": blocks}
    llm = make_llm(checkpoints.path(variant), **limits)
    if ranks > 1:
        executor = RankedExecutor(checkpoints.path(variant), ranks)
        scheduler = Scheduler(scheduler_limits(llm.config, MAX_MODEL_LEN), blocks, list(executor.kv_cache.specs), 16)
        llm.core = EngineCore(scheduler, executor)
    outputs = generate(llm, [text for text, _ in requests], [param for _, param in requests])
    assert_preempted(llm)
    assert llm.core.scheduler.stats.prefix_hits > 0
    assert [[(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in outputs] == [
        [(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in expected
    ]


def sums_of_a_layer(spec: DecoderSpec, layer: int) -> int:
    mixer, branches = spec.mixers[layer], 1 if spec.residual in ("parallel", "single") else 2
    normed = isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None and mixer.qk_norm_over == "all"
    sub_normed = sum(getattr(part, "sub_norm", None) is not None for part in (mixer, spec.mlps[layer]))
    selective = isinstance(mixer, MambaSpec)
    # The squares of queries and of keys, and of a projection's inputs; and B, C and the input of time steps.
    return branches + 2 * normed + sub_normed + selective


@pytest.mark.sampled(22)
@pytest.mark.parametrize("variant", FIRST)
def test_ranks_add_up_twice_a_layer_or_once_if_attention_and_mlp_share_a_residual(checkpoints, variant):
    """And once for each embedding. The logits are gathered once."""
    runners = runners_of_ranks(checkpoints.path(variant), 2)
    groups = [runner.model.residual_stream.group for runner in runners]
    for group in groups:
        group.calls.clear()
    logits_of_ranks(runners, [5, 6, 7])
    spec = runners[0].model.spec
    sums = [sums_of_a_layer(spec, layer) for layer in range(spec.num_layers)]
    embeddings = 1 if spec.per_layer is None else 2
    assert [group.calls for group in groups] == [{"all_reduce": embeddings + sum(sums), "all_gather": 1}] * 2
    if variant in ("gpt_neox", "falcon", "cohere", "phi"):
        assert sums == [1] * spec.num_layers
    if variant in ("llama", "deepseek_v2", "qwen2_moe", "gpt_oss"):
        assert sums == [2] * spec.num_layers


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
def test_more_ranks_than_a_layer_has_parts_for_are_an_error(checkpoints, variant):
    with pytest.raises(ValueError, match="tensor_parallel_size=40 is too large: a feed-forward layer has"):
        worker(checkpoints.path(variant), ThreadGroup(0, 40))


# ---- processes


def check_two_processes(checkpoints: Checkpoints, references: References, variant: str, depth: int) -> None:
    """In chunks and with preemptions, `depth` steps in flight on two ranks give transformers' tokens."""
    expected = references.continuations(variant)
    plain = make_llm(checkpoints.path(variant), num_gpu_blocks_override=200)
    blocks = plain.core.scheduler.kv.max_blocks(MAX_MODEL_LEN) + 10
    llm = make_llm(
        checkpoints.path(variant),
        tensor_parallel_size=2,
        async_scheduling=depth == 2,
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
        made = tokens_of(generate(llm, [c.prompt for c in expected[:16]]))
        for continuation, token_ids in zip(expected, made, strict=False):
            continuation.check(token_ids)
        if not all(isinstance(spec, StateSpec) for spec in llm.core.scheduler.kv.specs):  # whose requests do not grow
            assert_preempted(llm)
        assert most_in_flight == depth
        # A request that the ranks refuse fails alone.
        llm.core.add_request(EngineCoreRequest("bad", [5, 99_999], GREEDY, seed=0, max_tokens=4))
        llm.core.add_request(EngineCoreRequest("good", expected[0].prompt, GREEDY, seed=0, max_tokens=4))
        ended = finish(llm.core)
        assert ended["bad"][:2] == ([], "error")
        assert ended["good"][0] == expected[0].token_ids[:4]
    finally:
        llm.shutdown()


# KV heads shared out, one step at a time; and one KV head on both, two steps in flight.
@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "depth"), [("llama-gqa2-tied-llama3", 1), ("qwen2", 2)])
def test_two_processes_say_what_one_does(checkpoints, references, variant, depth):
    check_two_processes(checkpoints, references, variant, depth)


@pytest.mark.sampled(66)
@pytest.mark.nightly
@pytest.mark.parametrize("variant", FIRST)
def test_two_steps_in_flight_on_two_processes_say_what_transformers_says(checkpoints, references, variant):
    check_two_processes(checkpoints, references, variant, depth=2)


def test_the_reference_itself_agrees_on_a_fresh_checkpoint(tmp_path):
    """One process, an odd vocabulary, a checkpoint that no other test shares: the comparison is not of copies."""
    path = write_checkpoint(tmp_path, "qwen3", {"vocab_size": 307, "head_dim": 24}, seed=9)
    expected = greedy(load(path), prompts(307, 9), 16)
    made = tokens_of(generate(make_llm(path), [c.prompt for c in expected], GREEDY.clone(max_tokens=16)))
    for continuation, token_ids in zip(expected, made, strict=True):
        continuation.check(token_ids)
    assert torch.get_num_threads() == 1
