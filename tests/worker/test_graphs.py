"""Steps that are replayed say what steps say in which every kernel is called anew, to the bit."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from quire.checkpoints.hub import bundled_model
from quire.engine.llm import LLM
from quire.layers.step_inputs import StepSize
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput, TokenEdits
from quire.ops.cpu.build import library
from support.checkpoints import ALL_VARIANTS, write_checkpoint
from support.engines import assert_preempted, generate, make_llm, tokens_of

pytestmark = pytest.mark.texts

if library() is None:
    pytest.skip("the CPU kernels cannot be compiled here", allow_module_level=True)

PROMPTS = [[7 + i] * length for i, length in enumerate([1, 15, 16, 17, 30, 31, 64, 90])]
# Some end earlier than others: the number of requests in a step changes all the time.
PARAMS = [SamplingParams(temperature=0, max_tokens=6 + 5 * i, ignore_eos=True, logprobs=1) for i in range(len(PROMPTS))]
RECORDED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral-window-20"]
# Of the others, one for each kind of layer that has kernels of its own.
MORE_RECORDED = [
    "qwen3_moe", "qwen2_moe", "phimoe", "llama4", "deepseek_v3", "deepseek_v32", "falcon-rw", "olmo2", "olmo-clipped",
    "cohere-query-key-norms", "granite", "exaone4", "nemotron", "apertus", "ministral3", "falcon_h1", "qwen3_next",
    "rwkv7",
]  # fmt: skip


def said(llm: LLM) -> list[Any]:
    """Tokens and logprobs, each with others running beside it, twice: the second time nothing is new."""
    first, second = generate(llm, PROMPTS, PARAMS), generate(llm, PROMPTS, PARAMS)
    assert tokens_of(first) == tokens_of(second)
    outputs = [completion for request in second for completion in request.outputs]
    return [(o.token_ids, [{t: v.logprob for t, v in at.items()} for at in o.logprobs]) for o in outputs]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.sampled(5)] * (name != "gemma3")) for name in RECORDED]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        pytest.param({"dtype": "float16"}, marks=pytest.mark.sampled(3)),
    ],
    ids=str,
)
def test_replayed_steps_change_nothing(tmp_path, variant, options):
    kind, config, writing = ALL_VARIANTS[variant]
    path = write_checkpoint(tmp_path, kind, config, **writing)
    options = {"dtype": "bfloat16", **options}
    llm = make_llm(path, **options)
    graphs = llm.core.executor.runner.forward
    assert said(llm) == said(make_llm(path, enforce_eager=True, **options))
    assert graphs.usable
    if llm.config.scheduler.speculation is None:  # drafts would give steps of other sizes
        assert sorted(graphs._recorded) == [StepSize(n, n, 1) for n in range(1, len(PROMPTS) + 1)]


def test_preempted_requests_too():
    options = {"max_model_len": 256, "max_num_seqs": 16}
    roomy = LLM(bundled_model(), enforce_eager=True, num_gpu_blocks_override=400, **options)
    crowded = LLM(bundled_model(), num_gpu_blocks_override=20, enable_prefix_caching=False, **options)
    assert tokens_of(generate(crowded, PROMPTS, PARAMS)) == tokens_of(generate(roomy, PROMPTS, PARAMS))
    assert_preempted(crowded)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("variant", MORE_RECORDED)
def test_so_do_those_of_other_layers(tmp_path, variant):
    kind, config, writing = ALL_VARIANTS[variant]
    path = write_checkpoint(tmp_path, kind, config, **writing)
    llm = make_llm(path, dtype="bfloat16")
    assert said(llm) == said(make_llm(path, dtype="bfloat16", enforce_eager=True))
    assert llm.core.executor.runner.forward.usable


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_so_do_those_of_quantized_experts_that_fill_panels(tmp_path, quantization):
    path = write_checkpoint(tmp_path, "qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32})
    llm = make_llm(path, dtype="bfloat16", quantization=quantization)
    assert said(llm) == said(make_llm(path, dtype="bfloat16", enforce_eager=True, quantization=quantization))
    assert llm.core.executor.runner.forward.usable


def test_engines_of_several_threads_record_their_own_kernels():
    engines = [LLM(bundled_model(), max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=400) for _ in range(2)]
    wanted = tokens_of(generate(LLM(bundled_model(), enforce_eager=True, max_model_len=256), PROMPTS, PARAMS))
    with ThreadPoolExecutor(len(engines)) as pool:
        for made in pool.map(lambda llm: tokens_of(generate(llm, PROMPTS, PARAMS)), engines):
            assert made == wanted


def test_a_model_of_other_operations_runs_as_ever(tmp_path):
    kind, config, writing = ALL_VARIANTS["qwen3_moe"]
    path = write_checkpoint(tmp_path, kind, config, **writing)
    options = {"dtype": "bfloat16", "quantization": "int8"}  # torch computes quantized experts that fill no panels
    llm = make_llm(path, **options)
    assert said(llm) == said(make_llm(path, enforce_eager=True, **options))
    assert not llm.core.executor.runner.forward.usable
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.slow
def test_recording_does_not_import_torchs_compiler():
    """It would take a second of the first answer, and 130 MB."""
    program = """
import sys
from quire import LLM, SamplingParams
LLM(max_model_len=128).generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_steps_with_equally_many_drafts_a_row_are_recorded_too(checkpoints):
    """By their tokens for each request: steps of other drafts, and prompts, are not taken for them."""
    llm = make_llm(checkpoints.path("llama"))
    executor = llm.core.executor
    forward = executor.runner.forward
    text = [[5, 9, 2, 7, 4, 8, 3, 6], [6, 6, 1, 8, 2, 5, 5, 9]]
    groups = len(executor.runner.batch.block_tables)
    edits = BlockTableEdits(
        [g for g in range(groups) for _ in range(2)],
        [0, 1] * groups,
        [0] * 2 * groups,
        [1 + i for i in range(2 * groups)],
    )

    def run(step_id: int, counts: list[int], drafts: list[int]) -> list[list[int]]:
        """The last tokens of both rows; those before are computed in a step of their own, which has no drafts."""
        new, guesses = [], TokenEdits()
        for row, (tokens, count) in enumerate(zip(text, drafts or [0, 0], strict=True)):
            known = len(tokens) - count
            new.append(NewRequest(str(row), row, tokens[:known], known, 0, SamplingParams(temperature=0), 0))
            guesses.rows += [row] * count
            guesses.positions += range(known, len(tokens))
            guesses.token_ids += tokens[known:]
        before = [len(tokens) - count for tokens, count in zip(text, counts, strict=True)]
        executor.submit(SchedulerOutput(step_id, new, [0, 1], before, edits))
        executor.sample(step_id).result()
        executor.submit(SchedulerOutput(step_id + 1, [], [0, 1], counts, num_draft_tokens=drafts, draft_tokens=guesses))
        return executor.sample(step_id + 1).result().sampled_token_ids

    made = [run(step_id, [3, 3], [2, 2]) for step_id in (0, 10, 20)]
    assert made[0] == made[1] == made[2]
    assert list(forward._recorded) == [StepSize(6, 2, 3)]
    forward.usable = False
    assert run(30, [3, 3], [2, 2]) == made[0]
    forward.usable = True
    run(40, [3, 4], [2, 3])
    run(50, [3, 3], [])
    assert list(forward._recorded) == [StepSize(6, 2, 3)]
