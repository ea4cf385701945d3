"""What follows from the declaration of a step's inputs: arrays of padding, padding behind arrays, dummy steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.layers.step_inputs import Declaration, StepInputs, StepSize, dimensions, dummy_arrays


def test_arrays_are_padded_in_each_dimension_that_is_too_short():
    lengths = dimensions(StepSize(5, 3), groups=2, blocks=4)
    numbers = Declaration(("tokens",), np.int64, -1, "layers")
    assert numbers.padded(np.array([7, 8]), lengths).tolist() == [7, 8, -1, -1, -1]
    assert numbers.padded(np.arange(5), lengths).tolist() == [0, 1, 2, 3, 4]
    ends = Declaration(("bounds",), np.int32, None, "attention")
    assert ends.padded(np.array([0, 2, 5], np.int32), lengths).tolist() == [0, 2, 5, 5]
    table = Declaration(("groups", "requests"), np.int32, 9, "attention")
    assert table.padded(np.ones((2, 1), np.int32), lengths).tolist() == [[1, 9, 9], [1, 9, 9]]
    assert table.blank(lengths).tolist() == [[9, 9, 9], [9, 9, 9]]
    assert table.blank(lengths).dtype == np.int32


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [32, 32, 32, 4], [3, 0, 0], [2, 2]])
def test_a_dummy_step_has_tokens_that_are_not_kept(counts):
    size = StepSize(sum(counts), len(counts))
    declarations = StepInputs.declarations()
    arrays = dummy_arrays(declarations, dimensions(size, groups=2, blocks=2), np.array(counts))
    inputs = StepInputs(size=size, **{name: torch.from_numpy(array) for name, array in arrays.items()})
    assert arrays.keys() == declarations.keys()
    assert inputs.positions.tolist() == [position for count in counts for position in range(count)]
    assert inputs.slot_mapping.tolist() == [[-1] * size.tokens] * 2
    assert inputs.query_start_loc.tolist() == [0, *np.cumsum(counts).tolist()]
    assert inputs.seq_lens.tolist() == counts
    assert len(inputs.layouts()) == 2
