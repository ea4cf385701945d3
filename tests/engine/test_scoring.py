"""Scores of pairs whose texts a template renders, and of documents that a model reads at once."""

from __future__ import annotations

import pytest
import torch

from quire import LLM
from support.pooling_families import DECODER, drawn, edit, saved, states_of

TEMPLATE = (
    "{{ instruction | default('Find') }}: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') "
    "| first }} -> {{ (messages | selectattr('role', 'eq', 'document') | first).content }}."
)


def test_a_template_renders_both_texts_for_a_cross_encoder(tmp_path):
    model = saved(tmp_path, "Qwen3", DECODER, "ForSequenceClassification", num_labels=1)
    llm = LLM(str(tmp_path), dtype="float32", chat_template=TEMPLATE)

    def wanted(text: str) -> float:
        with torch.no_grad():
            return float(model(torch.tensor([llm.get_tokenizer().encode(text)])).logits.sigmoid())

    [one, two] = llm.score("a", ["b", "c d"], use_tqdm=False)
    assert one.outputs.score == pytest.approx(wanted("Find: a -> b."), rel=1e-4)
    assert two.outputs.score == pytest.approx(wanted("Find: a -> c d."), rel=1e-4)
    [other] = llm.score("a", "b", chat_template_kwargs={"instruction": "Judge"}, use_tqdm=False)
    assert other.outputs.score == pytest.approx(wanted("Judge: a -> b."), rel=1e-4)
    plain = LLM(str(tmp_path), dtype="float32")
    with pytest.raises(ValueError, match="scores have no template"):
        plain.score("a", "b", chat_template_kwargs={"instruction": "Judge"})


def test_a_model_reads_all_documents_and_scores_their_marks(tmp_path):
    """jina-reranker-v3, with a tokenizer that has its two marks."""
    import tokenizers

    states = states_of(saved(tmp_path, "Qwen3", {**DECODER, "vocab_size": 151_672, "max_position_embeddings": 2048}))
    inner, outer = drawn(32, 64), drawn(512, 32)
    head = {"projector.0.weight": inner, "projector.2.weight": outer}
    edit(
        tmp_path,
        lambda tensors: {**{f"model.{name}": tensor for name, tensor in tensors.items()}, **head},
        architectures=["JinaForRanking"],
    )
    words = {f"<{i}>": i for i in range(256, 151_670)} | {"<|embed_token|>": 151_670, "<|rerank_token|>": 151_671}
    bytes_of = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(bytes_of)} | words, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|embed_token|>", "<|rerank_token|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), dtype="float32")
    outputs = llm.score("which?", ["this", "that <|rerank_token|>"], use_tqdm=False)
    [ids] = {tuple(output.prompt_token_ids) for output in outputs}
    assert tokenizer.decode(list(ids)).count("that ") == 1
    marks = [i for i, token in enumerate(ids) if token >= 151_670]
    assert [ids[i] for i in marks] == [151_670, 151_670, 151_671]
    vectors = torch.relu(states(list(ids))[marks] @ inner.T) @ outer.T
    cosines = torch.nn.functional.cosine_similarity(vectors[:2], vectors[2:])
    assert [output.outputs.score for output in outputs] == pytest.approx(cosines.tolist(), abs=1e-4)
    pairs = llm.score(["a", "b"], ["c", "d"], chat_template_kwargs={"instruction": "Go."}, use_tqdm=False)
    assert len({tuple(output.prompt_token_ids) for output in pairs}) == 2
    assert "<instruct>\nGo.\n</instruct>" in tokenizer.decode(list(pairs[0].prompt_token_ids))
