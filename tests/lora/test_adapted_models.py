"""Adapters give the greedy tokens of the model into which they are merged, for every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.llm import LLM
from quire.lora import LoRARequest
from support.adapters import merged, modules_of, write_adapter
from support.checkpoints import FAMILIES
from support.engines import GREEDY, assert_nothing_is_left, make_llm
from support.reference import prompts

COMBINES = [
    "adapters × chunked prefill, prefix caching, sliding window, experts, latent attention, sinks, soft caps and ALiBi"
]
FIRST = [variants[0] for variants in FAMILIES.values()]
NUM_TOKENS = 24
TIE = 1e-3
OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def certain_tokens(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens up to the first one that a rounding error might change."""
    outputs = llm.generate(texts, GREEDY.clone(max_tokens=NUM_TOKENS, logprobs=2), use_tqdm=False)
    found = []
    for output in outputs:
        [completion] = output.outputs
        gaps = []
        for place in completion.logprobs or []:
            first, second, *_ = sorted((entry.logprob for entry in place.values()), reverse=True)
            gaps.append(first - second)
        count = next((i for i, gap in enumerate(gaps) if gap < TIE), len(gaps))
        found.append(completion.token_ids[:count])
    return found


def adapted_tokens(llm: LLM, texts: list[list[int]], adapters: list[Path | None]) -> list[list[int]]:
    requests = [None if path is None else LoRARequest(path.name, 1, str(path)) for path in adapters]
    params = GREEDY.clone(max_tokens=NUM_TOKENS)
    outputs = llm.generate(texts, params, use_tqdm=False, lora_request=requests)
    assert_nothing_is_left(llm.core)
    return [output.outputs[0].token_ids for output in outputs]


def check(made: list[list[int]], wanted: list[list[int]]) -> None:
    for got, certain in zip(made, wanted, strict=True):
        assert got[: len(certain)] == certain
    assert sum(map(len, wanted)) > len(wanted) * NUM_TOKENS / 2, "there are too many ties"


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
