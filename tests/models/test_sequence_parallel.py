"""Ranks that divide the tokens of the residual stream between them say what ranks say that all have the whole stream.

Most splits are tried with ranks that are threads; a few with real processes, which cost seconds each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.parallel.mesh import open_meeting
from support.adapters import OPTIONS, adapted_tokens, check, modules_of, write_adapter
from support.drafters import Drafters
from support.engines import GREEDY, assert_preempted, generate, logits_of_ranks, make_llm, runners_of_ranks, tokens_of
from support.reference import LENGTHS, prompts
from support.staged_ranks import StagedExecutor
from support.waiting import LONGEST
from support.ways import FIRST

pytestmark = pytest.mark.texts

TEXT = prompts(300, 9)[8][:40]
CHUNKS = [1, 2, 7, 30]  # with three ranks, the first two leave some without tokens


def logits_and_calls(path: Any, ranks: int, **options: Any) -> tuple[torch.Tensor, dict[str, int]]:
    runners = runners_of_ranks(path, ranks, **options)
    calls = runners[0].model.residual_stream.group.calls
    calls.clear()
    return logits_of_ranks(runners, TEXT, CHUNKS), dict(calls)


@pytest.mark.sampled(68)
@pytest.mark.parametrize(("number", "variant"), list(enumerate([*FIRST, "opt-post-norm-projections", "gpt_oss"])))
def test_divided_tokens_give_the_same_logits(checkpoints, number, variant):
    ranks = 2 + number % 2
    wanted, calls = logits_and_calls(checkpoints.path(variant), ranks)
    made, divided = logits_and_calls(checkpoints.path(variant), ranks, enable_sequence_parallel=True)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    assert divided["reduce_scatter"] == calls["all_reduce"] - divided["all_reduce"]
    norms = 1 if variant == "gpt_neox" else 0  # its MLP has an input of its own, behind a norm of its own
    layers = divided["reduce_scatter"] * (1 + norms)
    assert divided["all_gather_rows"] == layers + len(CHUNKS)  # the final hidden states
    assert divided["all_gather"] == calls["all_gather"]


def divided(path: Any, ranks: int, stages: int = 1, **options: Any) -> LLM:
    """An engine whose ranks are threads."""
    options |= {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "enable_sequence_parallel": True}
    with mock.patch("quire.executor.choice.MultiprocExecutor", StagedExecutor):
        return make_llm(path, **options)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("variant", "ranks", "stages"),
    [
        ("llama", 2, 1),
        ("llama-gqa2-tied-llama3", 3, 2),
        ("gemma3", 2, 2),
        ("gpt_neox", 3, 1),
        ("falcon", 2, 2),
        ("opt-post-norm-projections", 3, 2),
        ("deepseek_v3", 2, 2),
    ],
)
def test_ranks_together_say_what_transformers_says(checkpoints, references, variant, ranks, stages):
    expected = references.continuations(variant)[: len(LENGTHS)]
    made = tokens_of(generate(divided(checkpoints.path(variant), ranks, stages), [c.prompt for c in expected]))
    for continuation, token_ids in zip(expected, made, strict=True):
        continuation.check(token_ids)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("variant", "blocks", "ranks", "stages"),
    [("mistral-window-20", 12, 3, 1), pytest.param("qwen3-mixed-windows-biases", 24, 2, 2, marks=pytest.mark.slow)],
)
def test_all_features_at_once_change_nothing(checkpoints, variant, blocks, ranks, stages):
    """Chunks, preemption in a tiny pool, cached prefixes, windows, seeds, n, stop strings in one batch."""
    plain = make_llm(checkpoints.path(variant))
    texts = prompts(320, 6)
    text = generate(plain, texts[:1])[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = [
        SamplingParams(temperature=0.9, seed=11, n=3, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        GREEDY.clone(stop=[stop]),
    ]
    requests = [(text, param) for text in texts for param in params]
    expected = [generate(plain, [text], [param])[0] for text, param in requests]
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_gpu_blocks_override": blocks}
    llm = divided(checkpoints.path(variant), ranks, stages, **limits)
    outputs = generate(llm, [text for text, _ in requests], [param for _, param in requests])
    assert_preempted(llm)
    assert [[(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in outputs] == [
        [(c.token_ids, c.text, c.stop_reason) for c in o.outputs] for o in expected
    ]


@pytest.mark.sampled(4)
@pytest.mark.plain("it has drafts of its own")
@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.sampled(4)) for kind in ("similar", "medusa", "eagle"))]
)
def test_drafters_read_the_hidden_states_of_all_tokens(checkpoints, tmp_path_factory, kind):
    drafters, texts = Drafters(checkpoints, tmp_path_factory), prompts(320, 9)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]
    path, config = drafters.target("llama"), drafters.config(kind, "llama")
    plain = make_llm(path, speculative_config=config, max_num_seqs=6)
    expected = tokens_of(generate(plain, texts, params))
    llm = divided(path, 2, speculative_config=config, max_num_seqs=6)
    assert tokens_of(generate(llm, texts, params)) == expected
    accepted = llm.core.stats.speculation.accepted_tokens, plain.core.stats.speculation.accepted_tokens
    assert accepted[0] == pytest.approx(accepted[1], rel=0.1)


def test_adapters(checkpoints, tmp_path):
    base, texts = checkpoints.path("llama"), prompts(300, 9)
    llm = make_llm(base, **OPTIONS)
    adapters = [write_adapter(tmp_path / f"a{i}", modules_of(llm), rank=4, seed=i) for i in range(3)]
    chosen = [adapters[i % 3] if i % 4 else None for i in range(9)]
    expected = adapted_tokens(llm, texts, chosen)
    check(adapted_tokens(divided(base, 2, **OPTIONS), texts, chosen), expected)


def test_one_rank_has_nothing_to_divide():
    with pytest.raises(ConfigError, match="enable_sequence_parallel needs a tensor_parallel_size of 2 or more"):
        EngineConfig.create(enable_sequence_parallel=True)


# ---- processes

# Each rank runs the same steps without recordings, with the whole stream and with a part of it, prints which were
# recorded, and compares.
# Of a single token, one rank has nothing.
PROGRAM = """
import os, sys
from dataclasses import replace
from pathlib import Path
import torch
from quire.config.engine import EngineConfig
from quire.ops.cpu.shared_sums import with_shared_sums
from quire.parallel.mesh import join
from quire.parallel.sizes import MeshSizes
from quire.worker.worker import Worker
from support.engines import forced_logits
rank, port, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
mesh, made = join(MeshSizes(tp=2), rank, "127.0.0.1", port), []
mesh = replace(mesh, tp=with_shared_sums(mesh.tp))
for options in ({"enforce_eager": True}, {}, {"enable_sequence_parallel": True}):
    config = EngineConfig.create(model=str(path), max_num_seqs=4, tensor_parallel_size=2, num_gpu_blocks_override=40,
                                 mamba_block_size=16, **options)
    runner = Worker(config, path, 176, mesh).runner
    made.append(forced_logits(runner, list(range(40, 80)), [30, *[1] * 10]))
    print(sorted(size.tokens for size in getattr(runner.forward, "_recorded", ())), flush=True)
assert all(torch.equal(each, made[0]) for each in made)  # both add up in the order of the ranks
os._exit(0)  # Gloo may abort a process that ends right after a collective
"""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "rwkv7"])
def test_processes_compute_the_same_bits_in_recorded_steps(checkpoints, variant):
    store, path = open_meeting("127.0.0.1"), str(checkpoints.path(variant))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store.port), path],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=LONGEST)[0].split("\n")[:3] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said == [["[]", "[1]", "[1]"]] * 2
