"""The state of the running requests on a device that works late is what the host would have written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kv.specs import attention_spec
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.ops.reference.batch import append_tokens
from quire.worker.input_batch import InputBatch
from quire.worker.state import DeviceState, shared_state
from support.engines import GREEDY, assert_preempted, generate, make_llm
from support.late_device import run_late

pytestmark = pytest.mark.texts

TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40, "max_num_seqs": 12}


def assert_same_state(state: DeviceState, batch: InputBatch) -> None:
    wanted = shared_state(batch)
    for name in ("num_tokens", "num_computed", "num_prompt", "block_tables"):
        assert torch.equal(getattr(state, name), getattr(wanted, name)), name
    known = torch.arange(wanted.token_ids.shape[1]) < wanted.num_tokens[:, None]
    assert torch.equal(state.token_ids[known], wanted.token_ids[known])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "captured"),
    [
        pytest.param({}, False, id="roomy"),
        pytest.param(TIGHT, True, id="tight-captured"),
        pytest.param({}, True, id="roomy-captured", marks=pytest.mark.nightly),
        pytest.param(TIGHT, False, id="tight", marks=pytest.mark.nightly),
    ],
)
def test_the_state_follows_requests_that_come_go_and_are_preempted(checkpoints, references, options, captured):
    llm = make_llm(checkpoints.path("qwen3-mixed-windows-biases"), **options)
    device = run_late(llm, captured=captured)
    prompts = [c.prompt for c in references.continuations("qwen3-mixed-windows-biases")[:16]]
    generate(llm, prompts, [GREEDY.clone(max_tokens=5 + 3 * i) for i in range(len(prompts))])
    if options:
        assert_preempted(llm)
    else:
        assert not llm.core.scheduler.stats.preemptions
    if device.stream.queue:
        device.stream.run_until(device.stream.queue[-1])
    assert_same_state(device.runner.staging.state, device.runner.batch)
    assert device.runner.batch.num_tokens.max() > 16


def test_on_a_cpu_the_state_is_the_batch_itself():
    batch = InputBatch(3, 32, 16, [attention_spec([])] * 2, 100)
    state = shared_state(batch)
    batch.install(NewRequest("a", 1, [4, 5, 6], 2, 1, SamplingParams(), 0))
    assert state.token_ids[1, :3].tolist() == [4, 5, 6]
    assert (state.num_tokens[1], state.num_prompt[1], state.num_computed[1]) == (3, 2, 1)


def test_changes_are_applied_in_any_number():
    """None, one and several requests, known tokens and edits, a cell edited twice, a row that another request had
    before."""
    batch, draw = InputBatch(4, 40, 16, [attention_spec([])] * 2, 100), np.random.default_rng(0)
    state = DeviceState.empty(batch, torch.device("cpu"))
    for step_id, count in enumerate([0, 1, 4, 2, 0, 3]):
        rows = draw.permutation(4)[:count].tolist()
        lengths = draw.integers(1, 40, count).tolist()
        new = [
            NewRequest("a", row, draw.integers(0, 100, n).tolist(), n, n - 1, SamplingParams(), 0)
            for row, n in zip(rows, lengths, strict=True)
        ]
        cells = [draw.integers(0, size, 2 * count).tolist() for size in batch.block_tables.shape]
        step = SchedulerOutput(step_id, new, [], [], BlockTableEdits(*cells, draw.integers(0, 9, 2 * count).tolist()))
        for request in new:
            batch.install(request)
            if count > 1 and batch.num_tokens[request.row] < 38:  # tokens that were not sampled, for some of the rows
                start = int(batch.num_tokens[request.row])
                step.known_tokens.rows += [request.row] * 2
                step.known_tokens.positions += [start, start + 1]
                step.known_tokens.token_ids += [7, 8]
        batch.add_known_tokens(step)
        batch.edit_block_tables(step)
        arrays = {name: torch.from_numpy(array) for name, array in state.changes(batch, step).items()}
        state.apply(arrays)
        assert_same_state(state, batch)
        last = batch.num_tokens[rows] - 1
        batch.token_ids[rows, last + 1] = np.arange(count)
        batch.num_tokens[rows] += 1
        places = torch.tensor(rows, dtype=torch.int64), torch.from_numpy(last), torch.arange(count)
        append_tokens.reference(state.token_ids, state.num_tokens, *places)
        assert_same_state(state, batch)


@pytest.mark.parametrize("implementation", append_tokens.implementations, ids=lambda i: i.name)
def test_tokens_that_were_sampled_at_several_places_of_a_row_follow_the_tokens_of_their_places(
    implementation, interpreter
):
    batch = InputBatch(3, 40, 16, [attention_spec([])], 100)
    for row in range(3):
        batch.install(NewRequest("a", row, [1, 2, 3, 4, 5], 2, 0, SamplingParams(), 0))
    device = "cuda" if implementation.name == "triton" and torch.cuda.is_available() else "cpu"
    state = DeviceState.empty(batch, torch.device(device))
    for name, tensor in vars(shared_state(batch)).items():
        getattr(state, name).copy_(tensor)
    places = ([2, 2, 2, 0], [2, 3, 4, 4], [11, 12, 13, 14])
    implementation.function(state.token_ids, state.num_tokens, *(torch.tensor(x, device=device) for x in places))
    assert state.num_tokens.tolist() == [6, 5, 6]
    assert state.token_ids[:, :6].tolist() == [[1, 2, 3, 4, 5, 14], [1, 2, 3, 4, 5, 0], [1, 2, 3, 11, 12, 13]]
    none = torch.empty(0, dtype=torch.int64, device=device)
    implementation.function(state.token_ids, state.num_tokens, none, none, none)
    assert state.num_tokens.tolist() == [6, 5, 6]
