"""A step leaves no tensors in reference cycles, where they would keep their memory until Python's collector runs."""

from __future__ import annotations

import gc

import pytest
import torch

from support.checkpoints import ALL_VARIANTS
from support.engines import GREEDY, generate, make_llm


@pytest.mark.sampled(126)
@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_a_step_leaves_no_tensors_to_the_collector(checkpoints, variant):
    llm = make_llm(checkpoints.path(variant), max_num_batched_tokens=24, max_num_seqs=24)
    params = GREEDY.clone(max_tokens=3)
    prompts = [list(range(20, 20 + length)) for length in (1, 3, 40)]
    generate(llm, prompts, params)  # what is made once is made
    gc.collect()
    gc.freeze()  # what is there already need not be searched
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        generate(llm, prompts, params)
        gc.collect()
        left = [tuple(value.shape) for value in gc.garbage if isinstance(value, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    assert not left
