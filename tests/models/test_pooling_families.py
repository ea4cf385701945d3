"""Every architecture of vLLM's tables of pooling models that Quire runs, against an independent implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import LLM, PoolingParams
from support.every_family_page import POOLING_KINDS, vllm
from support.pooling_families import FAMILIES, HIDDEN, bge_m3, drawn, prompts
from support.pooling_forms import FORMS

MARKS = {  # tokens that a head looks for, at the place where a prompt's remainder of 5 is 0
    "JinaForRanking": 151_670,
    "Qwen2ForProcessRewardModel": 151_651,
}


def pooled(folder: Path, texts: list[list[int]], task: str | None = None, **options: object) -> list[Tensor]:
    """Each text's tensor, without normalization or activation."""
    llm = LLM(str(folder), dtype="float32", **options)  # type: ignore[arg-type]
    outputs = llm.encode(texts, PoolingParams(task=task, use_activation=False), use_tqdm=False)  # type: ignore[arg-type]
    llm.shutdown()
    return [output.outputs.data for output in outputs]


def check(got: list[Tensor], wanted: list[Tensor], bound: float = 1e-4) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        if theirs.numel():
            assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.std(correction=0)))


def texts_of(name: str) -> list[list[int]]:
    texts = prompts()
    if name in MARKS:
        texts = [[MARKS[name] if i % 5 == 0 else token for i, token in enumerate(text)] for text in texts]
    if name == "JinaForRanking":
        texts = [[*text[:-1], 151_671] for text in texts]
    if name == "BertSpladeSparseEmbeddingModel":
        texts = [[5], [5, 6], *([5, *text[1:-1], 6] for text in texts[2:])]
    return texts


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [*FAMILIES, *FORMS])
def test_vectors_and_scores_are_those_of_an_independent_implementation(tmp_path, name):
    family = {**FAMILIES, **FORMS}[name]
    reference = family.make(tmp_path)
    texts = texts_of(name)
    check(pooled(tmp_path, texts, family.task, **family.options), [reference(text) for text in texts])


def test_vllms_tables_name_each_of_them():
    named = {name for kind in POOLING_KINDS for name in vllm()[kind]}
    assert sorted(FAMILIES.keys() - named) == []


def test_bge_m3_has_three_heads(tmp_path):
    """One vector for a text, a vector for each token but the first, and a weight for each token between both ends."""
    dense = bge_m3(tmp_path)
    texts = [[7, *text, 9] for text in prompts()[:5]]
    torch_states = __import__("transformers").XLMRobertaModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = [torch_states(torch.tensor([text])).last_hidden_state[0] for text in texts]
    check(pooled(tmp_path, texts), [dense(text) for text in texts])
    vectors = [(hidden @ drawn(HIDDEN, HIDDEN).T + drawn(HIDDEN, seed=2))[1:] for hidden in states]
    check(pooled(tmp_path, texts, "token_embed"), vectors)
    weights = [(hidden @ drawn(1, HIDDEN).T + drawn(1, seed=2))[1:-1] for hidden in states]
    check(pooled(tmp_path, texts, "token_classify"), weights)
    llm = LLM(str(tmp_path), dtype="float32")
    params = [PoolingParams(task=task) for task in ("embed", "token_embed", "token_classify")]
    ours = [output.outputs.data for output in llm.encode([texts[3]] * 3, params, use_tqdm=False)]
    normalized = torch.nn.functional.normalize
    theirs = [normalized(dense(texts[3]), dim=-1), normalized(vectors[3], dim=-1), torch.relu(weights[3])]
    check(ours, theirs)
