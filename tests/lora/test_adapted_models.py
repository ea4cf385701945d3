"""Adapters give the greedy tokens of the model into which they are merged, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapters import OPTIONS, adapted_tokens, certain_tokens, check, merged, modules_of, write_adapter
from support.checkpoints import FAMILIES
from support.engines import make_llm
from support.reference import prompts

IN_EACH_RUN = ("llama", "deepseek_v3", "falcon_h1")  # also with experts, latent attention, recurrent layers
FIRST = [
    pytest.param(variants[0], marks=[] if variants[0] in IN_EACH_RUN else pytest.mark.sampled(12))
    for variants in FAMILIES.values()
]


@pytest.mark.sampled(66)
@pytest.mark.parametrize("variant", FIRST)
def test_adapters_in_one_batch_are_as_if_merged(checkpoints, tmp_path, variant):
    """Two adapters and the base model in one batch: chunked, and then with a warm cache."""
    base = checkpoints.path(variant)
    llm = make_llm(base, max_num_batched_tokens=48, max_num_seqs=16, **OPTIONS)
    modules = modules_of(llm, embedding=False)
    every = write_adapter(tmp_path / "every", modules, rank=8, seed=1)
    half = write_adapter(tmp_path / "half", dict(list(modules.items())[::2]), rank=3, seed=2, use_rslora=True)
    texts = prompts(300, 12)
    adapters: list[Path | None] = [(every, None, half)[i % 3] for i in range(len(texts))]
    wanted: list[list[int]] = [[]] * len(texts)
    for index, adapter in enumerate((every, None, half)):
        model = make_llm(base if adapter is None else merged(base, adapter, tmp_path / f"merged {index}"))
        wanted[index::3] = certain_tokens(model, texts[index::3])
    assert wanted[0] != wanted[1]
    for _ in range(2):
        check(adapted_tokens(llm, texts, adapters), wanted)
    # The same texts with other adapters: nothing is taken from the cache of the others.
    assert adapted_tokens(llm, texts, adapters[1:] + adapters[:1]) != wanted
    check(adapted_tokens(llm, texts, adapters), wanted)
