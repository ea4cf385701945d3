"""Encoders and models with pooling heads against transformers: the same hidden states, and the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, PoolingParams
from quire.config.engine import ConfigError
from support.pooling_families import DECODER, LOCAL, SIZES, prompts, saved, states_of

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SIZES, "type_vocab_size": 2}),
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "camembert": ("Camembert", SIZES),
    "modernbert": ("ModernBert", {**SIZES, **LOCAL}),
    "modernbert-biased": (
        "ModernBert",
        {**SIZES, **LOCAL, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic-bert": ("NomicBert", SIZES),
    "gte": ("Gte", {**SIZES, "type_vocab_size": 2}),
    "gte-without-types": ("Gte", {**SIZES, "type_vocab_size": 0}),
}
EMBEDDERS: dict[str, tuple[str, dict[str, Any]]] = {  # decoders without a head
    "qwen3": ("Qwen3", DECODER),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 32}),
    "llama": ("Llama", DECODER),
    "embedding-gemma": (
        "Gemma3Text",
        {
            **DECODER,
            "use_bidirectional_attention": True,
            "sliding_window": 16,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
        },
    ),
}


def pooled(folder: Path, texts: list[list[int]], task: str | None = None, **options: Any) -> list[Tensor]:
    """Each text's tensor, without normalization or activation."""
    llm = LLM(str(folder), dtype="float32", **options)
    params = PoolingParams(task=task, use_activation=False)
    outputs = llm.encode(texts, params, use_tqdm=False)
    llm.shutdown()
    return [output.outputs.data for output in outputs]


def check(got: list[Tensor], wanted: list[Tensor], bound: float = 2e-5) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.std(correction=0)))


def hidden_states(model: Any, texts: list[list[int]]) -> list[Tensor]:
    return [states_of(model)(text) for text in texts]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_hidden_states_are_those_of_transformers(tmp_path, variant):
    model, texts = saved(tmp_path, *VARIANTS[variant]), prompts()
    wanted = hidden_states(model, texts)
    check(pooled(tmp_path, texts, "token_embed"), wanted)
    check(pooled(tmp_path, texts), [states[0] for states in wanted])  # the first token by default
    check(pooled(tmp_path, texts, pooler_config={"pooling_type": "MEAN"}), [states.mean(0) for states in wanted])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", list(EMBEDDERS))
def test_decoders_without_a_head_embed_with_their_last_token(tmp_path, variant):
    model, texts = saved(tmp_path, *EMBEDDERS[variant]), prompts()
    wanted, place = hidden_states(model, texts), 0 if variant == "embedding-gemma" else -1
    check(pooled(tmp_path, texts, "token_embed"), wanted, 1e-4)
    check(pooled(tmp_path, texts), [states[place] for states in wanted], 1e-4)


def test_a_model_that_generates_embeds_if_it_is_told_to(tmp_path):
    model, texts = saved(tmp_path, "Qwen3", DECODER, "ForCausalLM"), prompts()
    wanted = [states[-1] for states in hidden_states(model.model, texts)]
    check(pooled(tmp_path, texts, runner="pooling"), wanted, 1e-4)
    check(pooled(tmp_path, texts, convert="embed"), wanted, 1e-4)
    check(pooled(tmp_path, texts, runner="pooling", max_num_seqs=2, max_num_batched_tokens=200), wanted, 1e-4)


HEADS = [
    ("bert", "ForSequenceClassification", {"num_labels": 3}),
    ("bert", "ForTokenClassification", {"num_labels": 5}),
    ("roberta", "ForSequenceClassification", {"num_labels": 1}),
    ("xlm-roberta", "ForTokenClassification", {"num_labels": 2}),
    ("modernbert", "ForSequenceClassification", {"num_labels": 3, "classifier_pooling": "mean"}),
    ("modernbert-biased", "ForSequenceClassification", {"num_labels": 1, "classifier_bias": True}),
    ("modernbert", "ForTokenClassification", {"num_labels": 3}),
    ("gte", "ForSequenceClassification", {"num_labels": 1}),
    ("nomic-bert", "ForSequenceClassification", {"num_labels": 2}),
    ("qwen3", "ForSequenceClassification", {"num_labels": 2}),
    ("llama", "ForSequenceClassification", {"num_labels": 1}),
    ("qwen3", "ForTokenClassification", {"num_labels": 4}),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("variant", "head", "settings"), HEADS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_scores_are_those_of_transformers(tmp_path, variant, head, settings):
    family, config = {**VARIANTS, **EMBEDDERS}[variant]
    if not hasattr(__import__("transformers"), family + head):
        pytest.skip("transformers does not have it")
    model, texts = saved(tmp_path, family, config, head, **settings), prompts()
    with torch.no_grad():
        wanted = [model(torch.tensor([text])).logits[0] for text in texts]
    check(pooled(tmp_path, texts), wanted, 1e-4)
    llm = LLM(str(tmp_path), dtype="float32")
    if "Token" not in head:
        probs = [output.outputs.probs for output in llm.classify(texts, use_tqdm=False)]
        activated = [w.sigmoid() if len(w) == 1 else w.softmax(0) for w in wanted]
        check([torch.tensor(p) for p in probs], activated, 1e-4)


@pytest.mark.parametrize(("words", "tied"), [(["n", "y"], False), (["n", "y"], True), (["y"], False)])
def test_a_reranker_scores_with_the_logits_of_words(tmp_path, words, tied):
    model = saved(tmp_path, "Qwen3", DECODER, "ForCausalLM", tie_word_embeddings=tied)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": words}
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling", hf_overrides=overrides)
    tokenizer, wanted, texts = llm.get_tokenizer(), [], ["Query: a\n", "b? ", "Document: " * 5]
    [*ids] = (tokenizer.encode(word, add_special_tokens=False)[0] for word in words)
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text + "end")])).logits[0, -1]
        wanted.append(float((logits[ids[-1]] - (logits[ids[0]] if len(ids) == 2 else 0)).sigmoid()))
    outputs = llm.score(texts, ["end"] * 3, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(wanted, rel=1e-4)
    for wrong, message in (("yes", "a list of one word or two"), (["yes", "no"], "should be a token")):
        with pytest.raises(ConfigError, match=message):
            LLM(str(tmp_path), runner="pooling", hf_overrides={**overrides, "classifier_from_token": wrong})


def test_the_second_text_of_a_pair_has_the_second_kind_of_segment(tmp_path):
    """With BERT's own tokenizer, from its vocabulary."""
    from transformers import BertTokenizerFast

    model = saved(tmp_path, *VARIANTS["bert"], head="ForSequenceClassification", num_labels=1)
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dog ran far ##s away".split()
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer.json").unlink()
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    pairs = [("the cat", "sat on a mat"), ("a dog", "the dogs ran far away"), ("the", "mat")]
    wanted = []
    for pair in pairs:
        encoded = tokenizer(*pair, return_tensors="pt")
        assert encoded["token_type_ids"].max() == 1
        with torch.no_grad():
            wanted.append(float(model(**encoded).logits.sigmoid()))
    llm = LLM(str(tmp_path), dtype="float32")
    outputs = llm.score([a for a, _ in pairs], [b for _, b in pairs], use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(wanted, rel=1e-4)


def test_a_text_has_the_same_vector_beside_any_others(tmp_path):
    saved(tmp_path, *VARIANTS["modernbert"])
    texts, llm = prompts(), LLM(str(tmp_path), dtype="bfloat16")
    together = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    for text, vector in zip(texts, together, strict=True):
        assert llm.embed([text], use_tqdm=False)[0].outputs.embedding == vector
