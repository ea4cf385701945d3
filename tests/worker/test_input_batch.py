"""The batch's rows become a step's inputs."""

from __future__ import annotations

import numpy as np

from quire.kv.specs import FullAttentionSpec, attention_spec
from quire.messages.step import BlockTableEdits, SchedulerOutput
from quire.worker.input_batch import InputBatch


class Reversed(FullAttentionSpec, frozen=True, tag=True):
    """Fills each block from its end."""

    def slots(self, tables, rows, positions, block_size):
        indices, offsets = np.divmod(positions, block_size)
        return tables[rows, indices] * block_size + block_size - 1 - offsets


def test_each_group_stores_tokens_where_its_spec_says():
    batch = InputBatch(2, 64, 16, [attention_spec([0]), Reversed(())], 100)
    batch.num_tokens[1], batch.num_computed[1] = 18, 14
    edits = BlockTableEdits([0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1], [3, 5, 7, 9])
    step = SchedulerOutput(1, rows=[1], num_tokens=[4], block_table_edits=edits)
    batch.edit_block_tables(step)
    inputs = batch.gather(batch.flatten(step))
    assert inputs["slot_mapping"].tolist() == [
        [3 * 16 + 14, 3 * 16 + 15, 5 * 16, 5 * 16 + 1],
        [7 * 16 + 1, 7 * 16, 9 * 16 + 15, 9 * 16 + 14],
    ]
    assert inputs["block_tables"].tolist() == [[[3, 5]], [[7, 9]]]
