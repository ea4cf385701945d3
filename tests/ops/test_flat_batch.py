"""Every way to make a flat batch makes the same one: numpy's, torch's and Triton's, over random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kv.specs import attention_spec
from quire.layers.step_inputs import StepInputs, StepSize, dimensions
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits, NewRequest, SchedulerOutput
from quire.ops import OPS
from quire.ops.registry import Implementation
from quire.worker.input_batch import InputBatch
from quire.worker.staging import MADE_ON_DEVICE
from quire.worker.state import shared_state
from support import triton_kernels

IMPLEMENTATIONS = OPS["flat_batch"].implementations
DEVICES = {"reference": "cpu", "triton": "cuda" if torch.cuda.is_available() else "cpu"}
BLOCK_SIZE, LONGEST = 16, 1600


def random_batch(draw: np.random.Generator, num_rows: int, groups: int) -> tuple[InputBatch, SchedulerOutput]:
    """Some rows with requests of any length, and a step that computes some tokens of some of them."""
    batch = InputBatch(num_rows, LONGEST, BLOCK_SIZE, [attention_spec([])] * groups, 1000)
    lengths = draw.integers(1, draw.choice([20, LONGEST]), num_rows)
    computed = [int(draw.integers(0, n)) for n in lengths]
    for row, (length, start) in enumerate(zip(lengths.tolist(), computed, strict=True)):
        batch.install(NewRequest("a", row, draw.integers(0, 1000, length).tolist(), length, start, SamplingParams(), 0))
    cells = [index.ravel().tolist() for index in np.indices(batch.block_tables.shape)]
    ids = draw.integers(0, 10**6, len(cells[0])).tolist()
    rows = draw.permutation(num_rows)[: draw.integers(1, num_rows + 1)].tolist()
    counts = [int(draw.integers(1, lengths[row] - computed[row] + 1)) for row in rows]
    if draw.random() < 0.3:
        counts = [1] * len(rows)
    step = SchedulerOutput(0, [], rows, counts, BlockTableEdits(*cells, ids))
    batch.edit_block_tables(step)
    return batch, step


@pytest.mark.sampled(5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=[i.name for i in IMPLEMENTATIONS])
@pytest.mark.parametrize("seed", range(20))
def test_all_make_the_same_flat_batch(implementation: Implementation, seed: int, interpreter):
    assert ("triton" in [i.name for i in IMPLEMENTATIONS]) == triton_kernels.INSTALLED
    draw = np.random.default_rng(seed)
    groups, device = int(draw.integers(1, 4)), DEVICES[implementation.name]
    batch, step = random_batch(draw, int(draw.integers(1, 9)), groups)
    state = {name: tensor.to(device, copy=True) for name, tensor in vars(shared_state(batch)).items()}
    flat = batch.flatten(step)
    tokens, requests = flat.size[:2]
    size = StepSize(tokens + int(draw.integers(0, 9)), requests + int(draw.integers(0, 3)))
    lengths = dimensions(size, groups, batch.block_tables.shape[2])
    declarations = StepInputs.declarations()
    wanted = {n: declarations[n].padded(a, lengths) for n, a in {**flat.inputs, **batch.gather(flat)}.items()}
    dtypes = {name: torch.from_numpy(wanted[name]).dtype for name in MADE_ON_DEVICE}
    made = {n: torch.full(wanted[n].shape, -77, dtype=dtype, device=device) for n, dtype in dtypes.items()}
    rows = torch.from_numpy(np.pad(flat.rows, (0, size.requests - requests))).to(device)
    starts = torch.from_numpy(wanted["query_start_loc"]).to(device)
    implementation.function(
        state["token_ids"], state["num_computed"], state["block_tables"], rows, starts, BLOCK_SIZE, *made.values()
    )
    for name, tensor in made.items():
        np.testing.assert_array_equal(tensor.cpu().numpy(), wanted[name], name)
