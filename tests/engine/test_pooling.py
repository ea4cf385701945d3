"""Embeddings and scores from Python, with a real model and with the forms in which such models are published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.config.engine import ConfigError
from support.checkpoints import byte_level_tokenizer
from support.minilm import minilm

DOCS = Path(__file__).parents[2] / "docs"


def sentences() -> list[str]:
    """A few hundred sentences of the project's own pages."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        text = re.sub(r"```.*?```|^[|#!].*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [" ".join(s.split()) for s in re.split(r"(?<=[.:])\s+|\n\n", text)]
    return [s for s in dict.fromkeys(found) if 20 < len(s) < 400][:400]


@pytest.fixture(scope="module")
def model() -> LLM:
    return LLM(str(minilm()))


@torch.no_grad()
def reference(texts: list[str], longest: int = 256) -> np.ndarray:
    """By transformers: the mean of the last hidden states, normalized, as sentence-transformers computes it."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, bert = AutoTokenizer.from_pretrained(minilm()), AutoModel.from_pretrained(minilm()).float().eval()
    made = []
    for text in texts:
        encoded = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        mean = bert(**encoded).last_hidden_state[0].mean(0)
        made.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.array(made)


def embeddings(llm: LLM, texts: Any, **options: Any) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, **options)])


@pytest.mark.slow
def test_a_real_model_gives_the_vectors_of_sentence_transformers(model):
    texts = ["a", "Hello, world!", "Über große Bäume 🌳", "word " * 200, *sentences()[:15]]
    assert (1 - (embeddings(model, texts) * reference(texts)).sum(1)).max() < 1e-5
    long = ["long text " * 400, "ein anderer " * 300]
    cut = embeddings(model, long, truncate_prompt_tokens=-1)
    assert (1 - (cut * reference(long)).sum(1)).max() < 1e-5
    short = embeddings(model, long, truncate_prompt_tokens=20)
    assert (1 - (short * reference(long, 20)).sum(1)).max() < 1e-5


@pytest.mark.nightly
@pytest.mark.slow
def test_a_search_of_the_projects_own_pages_ranks_as_the_reference(model):
    corpus = sentences()
    assert len(corpus) >= 300
    questions = [
        "How are keys and values cached in blocks?",
        "Which command starts the server?",
        "How is a model quantized?",
        "What happens if the process of the model dies?",
        "How do I make the answer follow a JSON schema?",
        "How are drafts verified so that the answer stays the same?",
        "Which metrics does the server have?",
    ]
    ours, theirs = embeddings(model, corpus), reference(corpus)
    for question in questions:
        scores = theirs @ reference([question])[0]
        ranking = np.argsort(-(ours @ embeddings(model, [question])[0]))[:20]
        expected = np.argsort(-scores)[:20]
        assert np.array_equal(ranking, expected) or np.abs(scores[ranking] - scores[expected]).max() < 1e-6
    outputs = model.score(questions[1], corpus, use_tqdm=False)
    scores = theirs @ reference([questions[1]])[0]
    np.testing.assert_allclose([output.outputs.score for output in outputs], scores, atol=1e-5)


def test_what_a_request_can_ask_for(model):
    text = "a text"
    full, short = embeddings(model, text)[0], embeddings(model, text, pooling_params=PoolingParams(dimensions=64))[0]
    assert len(full) == 384
    np.testing.assert_allclose(short, full[:64] / np.linalg.norm(full[:64]), rtol=1e-5)
    raw = embeddings(model, text, pooling_params=PoolingParams(use_activation=False))[0]
    np.testing.assert_allclose(raw / np.linalg.norm(raw), full, rtol=1e-4, atol=1e-7)
    [vectors] = model.encode(text, pooling_task="token_embed", use_tqdm=False)
    assert vectors.outputs.data.shape == (len(vectors.prompt_token_ids), 384)
    by_ids = embeddings(model, [{"prompt_token_ids": vectors.prompt_token_ids}])[0]
    np.testing.assert_array_equal(by_ids, full)
    mixed = [PoolingParams(), PoolingParams(task="token_embed"), PoolingParams(dimensions=3)]
    shapes = [tuple(o.outputs.data.shape) for o in model.encode([text] * 3, mixed, use_tqdm=False)]
    assert shapes == [(384,), (len(vectors.prompt_token_ids), 384), (3,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling_params": PoolingParams(dimensions=385)}, "dimensions must be at most 384"),
        ({"pooling_params": PoolingParams(task="classify")}, "task 'classify' is not one of this model's: embed"),
        ({"truncate_prompt_tokens": 300}, "truncate_prompt_tokens value .300. is greater than max_model_len .256."),
        ({"prompt_name": "query"}, "prompt_name 'query' is not one of the model's prompts: none"),
        ({"pooling_params": [PoolingParams()]}, "there are 2 prompts but 1 pooling_params"),
        ({"pooling_params": 5}, "pooling_params must be PoolingParams, got int"),
    ],
)
def test_wrong_parameters_are_errors_that_name_them(model, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        model.encode(["a", "b"], use_tqdm=False, **options)


def test_wrong_prompts_are_errors(model):
    for prompt, message in (
        ("word " * 300, "the prompt has 302 tokens, but max_model_len is 256"),
        ([5, 70_000], "token id 70000 is out of vocabulary"),
        ([], "the prompt is empty"),
        ({"text": "a"}, "prompt field 'text' is not supported"),
        ({"prompt": "a", "salt": "b"}, "prompt field 'salt' is not supported"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a non-empty string"),
        (7.5, "a prompt must be a string, token ids or a dict, got float"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.embed([prompt], use_tqdm=False)
    for prompt in ({"prompt": "a", "salt": "b"}, {"prompt": "a", "cache_salt": 5}):
        with pytest.raises(ValueError, match="salt"):
            model.embed([prompt], use_tqdm=False, truncate_prompt_tokens=5)
    with pytest.raises(ValueError, match="give one text to compare with 2, or as many, not 3"):
        model.score(["a", "b", "c"], ["d", "e"])
    with pytest.raises(ValueError, match="makes embeddings"):
        model.generate("a", use_tqdm=False)


def test_a_model_that_generates_does_not_embed(llm):
    with pytest.raises(ValueError, match="start it with runner='pooling'"):
        llm.embed("a")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_the_bundled_model_embeds_if_it_is_told_to():
    outputs = embeddings(LLM(runner="pooling"), ["a cat", "a kitten"])
    np.testing.assert_allclose(np.linalg.norm(outputs, axis=1), 1, rtol=1e-5)


def test_an_option_names_the_usual_task():
    [output] = LLM(str(minilm()), pooler_config={"task": "token_embed"}).encode([[101, 7592, 102]], use_tqdm=False)
    assert np.asarray(output.outputs.data).shape == (3, 384)


def test_pooling_options_that_do_not_fit_are_errors():
    for options, message in (
        ({"pooler_config": {"pooling_type": "STEP"}}, "pooling_type must be one of CLS, LAST"),
        ({"pooler_config": {"size": 3}}, "pooler_config has no field 'size'"),
        ({"pooler_config": {"task": "classify"}}, "pooler_config: task must be one of this model's, which are embed"),
        ({"runner": "generate"}, "is an encoder, which cannot generate"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "generates nothing"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            LLM(str(minilm()), **options)


# ---- other forms of sentence-transformers models


def bert(folder: Path, head: str = "Model", **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **config,
    )
    made = getattr(transformers, f"Bert{head}")(settings).float().eval()
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    made.tie_weights()
    made.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return made


def add_modules(folder: Path, *modules: tuple[str, dict[str, Any]], prompts: dict[str, Any] | None = None) -> None:
    """Write modules.json and the configs of the parts behind the model."""
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
        listed.append({"path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))


@torch.no_grad()
def states(made: Any, token_ids: list[int]) -> torch.Tensor:
    return made(torch.tensor([token_ids])).last_hidden_state[0]


def first(folder: Path, text: Any, **options: Any) -> torch.Tensor:
    prompt_name = options.pop("prompt_name", None)
    return LLM(str(folder), **options).encode(text, use_tqdm=False, prompt_name=prompt_name)[0].outputs.data


IDS = [5, 9, 200, 17, 33, 8, 61]


@pytest.mark.parametrize(
    ("mode", "formula"),
    [
        ("cls_token", lambda x: x[0]),
        ("mean_tokens", lambda x: x.mean(0)),
        ("max_tokens", lambda x: x.max(0).values),
        ("lasttoken", lambda x: x[-1]),
        ("mean_sqrt_len_tokens", lambda x: x.sum(0) / len(x) ** 0.5),
        ("weightedmean_tokens", lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / sum(range(len(x) + 1))),
    ],
)
def test_each_pooling_is_its_formula(tmp_path, mode, formula):
    made = bert(tmp_path)
    add_modules(tmp_path, ("Pooling", {f"pooling_mode_{mode}": True, "pooling_mode_other": False}))
    torch.testing.assert_close(first(tmp_path, IDS), formula(states(made, IDS)), rtol=1e-4, atol=1e-5)


def test_dense_layers_and_prompts_are_read(tmp_path):
    from safetensors.torch import save_file

    made = bert(tmp_path)
    dense = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    add_modules(
        tmp_path,
        ("Pooling", {"pooling_mode": "mean"}),
        ("Dense", dense),
        ("Normalize", {}),
        prompts={"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"},
    )
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")

    def wanted(text: str) -> torch.Tensor:
        ids = byte_level_tokenizer().encode(text).ids
        return torch.nn.functional.normalize(torch.tanh(states(made, ids).mean(0) @ weight.T + bias), dim=0)

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(first(tmp_path, "abc"), wanted("q: abc"), **close)
    torch.testing.assert_close(first(tmp_path, "abc", prompt_name="document"), wanted("abc"), **close)
    with pytest.raises(ValueError, match="prompt_name is for texts"):
        first(tmp_path, IDS, prompt_name="query")


def test_vectors_of_tokens_and_their_late_interaction(tmp_path):
    """A checkpoint of ColBERT."""
    from safetensors.torch import load_file, save_file

    made = bert(tmp_path)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    linear = torch.randn(16, 32)
    save_file({**tensors, "linear.weight": linear}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 16}))

    def wanted(text: str) -> torch.Tensor:
        ids = byte_level_tokenizer().encode(text).ids
        return torch.nn.functional.normalize(states(made, ids) @ linear.T, dim=-1)

    torch.testing.assert_close(first(tmp_path, "hello"), wanted("hello"), rtol=1e-4, atol=1e-5)
    llm = LLM(str(tmp_path))
    [output] = llm.score("hello you", "good morning", use_tqdm=False)
    interaction = (wanted("hello you") @ wanted("good morning").T).max(1).values.sum()
    assert output.outputs.score == pytest.approx(float(interaction), rel=1e-4)


def test_sparse_vectors_over_the_vocabulary(tmp_path):
    """A checkpoint of SPLADE: the largest log(1 + relu(logit)) of each token of the vocabulary."""
    made = bert(tmp_path, "ForMaskedLM")
    add_modules(tmp_path, ("SpladePooling", {"pooling_strategy": "max", "activation_function": "relu"}))
    with torch.no_grad():
        wanted = torch.log1p(torch.relu(made(torch.tensor([IDS])).logits[0])).max(0).values
    got = first(tmp_path, IDS)
    assert got.shape == (320,)
    assert 0 < (got == 0).sum() < 320
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_parts_that_are_not_supported_are_errors_that_name_them(tmp_path):
    bert(tmp_path)
    for module, message in (
        (("LSTM", {}), "a part LSTM, which is not supported"),
        (("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}), "the pooling cls and max"),
        (("Pooling", {"pooling_mode": "mean", "include_prompt": False}), "leaves out the prompt's tokens"),
    ):
        add_modules(tmp_path, module)
        with pytest.raises(ValueError, match=message):
            LLM(str(tmp_path))
    (tmp_path / "modules.json").write_text('[{"path": "../..", "type": "x.Pooling"}]')
    with pytest.raises(ValueError, match="outside of the model's directory"):
        LLM(str(tmp_path))


def test_decoders_embed_cached_prefixes_and_preempted_texts_alike():
    texts = [[7 + i % 250 for i in range(start, start + 100)] for start in range(0, 600, 40)]
    llm = LLM(runner="pooling", dtype="float32")
    first = llm.embed(texts, use_tqdm=False)
    again = llm.embed(texts, use_tqdm=False)
    assert all(output.num_cached_tokens == 96 for output in again)
    assert not any(
        output.num_cached_tokens for output in llm.embed(texts, PoolingParams(skip_reading_prefix_cache=True))
    )
    tight = LLM(runner="pooling", dtype="float32", num_gpu_blocks_override=20, max_model_len=128)
    for output, other, third in zip(first, again, tight.embed(texts, use_tqdm=False), strict=True):
        np.testing.assert_allclose(output.outputs.embedding, other.outputs.embedding, atol=1e-5)
        np.testing.assert_allclose(output.outputs.embedding, third.outputs.embedding, atol=1e-5)


def test_a_decoder_that_pools_its_first_token_reads_no_cached_prefix():
    llm, text = LLM(runner="pooling", pooler_config={"pooling_type": "CLS"}, dtype="float32"), list(range(7, 107))
    once, again = (llm.embed([text], use_tqdm=False)[0] for _ in range(2))
    assert again.num_cached_tokens == 0
    assert once.outputs.embedding == again.outputs.embedding


@pytest.mark.nightly
def test_an_encoder_is_split_over_two_processes(model):
    texts = ["a", "Hello, world!", "word " * 100]
    split = LLM(str(minilm()), tensor_parallel_size=2)
    try:
        np.testing.assert_allclose(embeddings(split, texts), embeddings(model, texts), atol=1e-5)
    finally:
        split.shutdown()
