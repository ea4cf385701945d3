"""Of tokens whose results nobody reads, the last layer computes keys and values alone."""

from __future__ import annotations

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.parallel.mesh import Communicator, Mesh
from quire.worker.plan import ForwardKind, choose_forward
from support.engines import make_llm, runner_of

VARIANTS = ["llama", "gemma2", "minicpm", "mixtral", "falcon", "falcon-40b", "opt-post-norm-projections", "deepseek_v3"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_rows_alone_are_as_among_all(checkpoints, variant):
    runner = runner_of(make_llm(checkpoints.path(variant)))
    groups = len(runner.batch.block_tables)
    edits = BlockTableEdits(
        [g for g in range(groups) for _ in range(2)],
        [0, 1] * groups,
        [0] * 2 * groups,
        [1 + i for i in range(2 * groups)],
    )
    new = [NewRequest(str(r), r, [5 + r, 9, 2, 7, 4], 5, 0, SamplingParams(), 0) for r in range(2)]
    step = SchedulerOutput(0, new, [0, 1], [5, 3], edits)
    for request in new:
        runner.batch.install(request)
    runner.batch.edit_block_tables(step)
    flat = runner.batch.flatten(step)
    inputs, _ = runner.staging.stage(flat, flat.size, step, {})
    everything = runner.forward(inputs).clone()
    for rows in ([4], [7, 0, 4], [], list(range(8))):
        made = runner.forward(inputs, torch.tensor(rows, dtype=torch.int64))
        torch.testing.assert_close(made, everything[rows], rtol=1e-5, atol=1e-5)


def test_the_last_layer_is_narrowed(checkpoints):
    """To the rows that sample, unless prompt logprobs are asked for."""
    llm = make_llm(checkpoints.path("llama"), max_num_batched_tokens=24, max_num_seqs=4)
    layers, seen = runner_of(llm).model.layers, []
    last = layers[-1].mlp
    layers[-1].mlp = lambda x, slots: (seen.append(len(x)), last(x, slots))[1]
    prompt = {"prompt_token_ids": [5, 9, 2, 7, 4] * 6}  # in chunks of 24 and 6
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert seen == [0, 1]
    seen.clear()
    llm.generate(
        [{"prompt_token_ids": [6, *prompt["prompt_token_ids"]]}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )
    assert seen == [24, 7]


@pytest.mark.parametrize(
    ("moves", "gpu", "kind"),
    [
        (True, True, ForwardKind.CAPTURED),
        (False, True, ForwardKind.CAPTURED),
        (True, False, ForwardKind.EAGER),
        (False, False, ForwardKind.RECORDED),
    ],
)
def test_graphs_contain_experts_that_move_and_recorded_steps_do_not(moves, gpu, kind):
    """Graphs read the tables of the experts' places, which change in place. Recorded steps would keep the first."""
    config = EngineConfig.create(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=moves)
    group = Communicator(0, 2, capturable=True)
    assert choose_forward(config, Mesh(size=2, tp=group, ep=group), gpu=gpu, backends=[])[0] is kind
