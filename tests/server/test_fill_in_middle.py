"""suffix of /v1/completions: prompts with a gap, in the forms of several families of models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from quire.checkpoints.hub import bundled_model
from quire.server.fill_in_middle import FillInMiddle
from quire.text.tokenizer import Tokenizer
from support.server import Host

# How each family writes a prefix and a suffix, and its special tokens.
FORMS = {
    "Qwen2.5-Coder": "<|fim_prefix|>{0}<|fim_suffix|>{1}<|fim_middle|>",
    "CodeGemma": "<|fim_prefix|>{0}<|fim_suffix|>{1}<|fim_middle|>",
    "StarCoder, Granite code": "<fim_prefix>{0}<fim_suffix>{1}<fim_middle>",
    "SantaCoder": "<fim-prefix>{0}<fim-suffix>{1}<fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>{0}<｜fim▁hole｜>{1}<｜fim▁end｜>",
    "CodeLlama": "▁<PRE>{0}▁<SUF>{1}▁<MID>",
    "Codestral": "[SUFFIX]{1}[PREFIX]{0}",
}
TOKENS = {
    "Qwen2.5-Coder": "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|file_sep|>",
    "CodeGemma": "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_separator|>",
    "StarCoder, Granite code": "<fim_prefix> <fim_suffix> <fim_middle>",
    "SantaCoder": "<fim-prefix> <fim-suffix> <fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
    "CodeLlama": "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>",
    "Codestral": "[PREFIX] [SUFFIX]",
}


def tokenizer_of(tokens: str, sentencepiece: bool) -> Tokenizer:
    """A tokenizer of characters with these special tokens. Like SentencePiece's, it may begin texts with a space."""
    vocab = {char: index for index, char in enumerate("▁abcdefxyz =☺")}
    backend = Backend(models.BPE({**vocab, "<s>": len(vocab)}, []))
    if sentencepiece:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ["<s>", *tokens.split()]]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(vocab))])
    return Tokenizer(backend, {"bos_token": "<s>"}, {})


@pytest.mark.parametrize("family", FORMS)
def test_a_prompt_with_a_gap_has_the_form_of_its_family(family):
    tokens, sentencepiece = TOKENS[family], family in ("CodeLlama", "Codestral")
    tokenizer = tokenizer_of(tokens, sentencepiece)
    fill = FillInMiddle.of(tokenizer)
    assert fill is not None
    expected = FORMS[family].format("▁a▁=" if sentencepiece else "a =", "b▁c" if sentencepiece else "b c")
    for special in (True, False):
        ids = fill.prompt("a =", "b c", special)
        spelled = "".join(tokenizer.id_to_token(token_id) or "" for token_id in ids)
        assert spelled == ("<s>" if special else "") + expected
    assert fill.prompt(tokenizer.encode("a =", False), "b c", True) == fill.prompt("a =", "b c", True)
    assert {tokenizer.id_to_token(token_id) for token_id in fill.ends} >= set(tokens.split())


def test_a_tokenizer_without_such_tokens_has_no_form():
    assert FillInMiddle.of(tokenizer_of("<|fim_prefix|> <|fim_suffix|>", False)) is None


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other names of three of its special tokens."""
    folder = tmp_path_factory.mktemp("coder")
    shutil.copytree(bundled_model(), folder, dirs_exist_ok=True)
    names = {"<tools>": "<|fim_prefix|>", "</tools>": "<|fim_suffix|>", "<tool_response>": "<|fim_middle|>"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in names.items():
            text = text.replace(json.dumps(old, ensure_ascii=False), json.dumps(new))
        (folder / name).write_text(text)
    return folder


def test_completions_fill_the_gap(coder):
    host = Host(model=str(coder), dtype="float32", kv_cache_memory_bytes=16 << 20)
    try:
        server = host.serve()
        prompts, suffix = ["Once upon a time", "The dog"], " was happy."
        fields = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        for stream in (False, True):
            answer = server.complete(prompts, suffix=suffix, stream=stream, **fields)
            choices = [choice for event in (answer if stream else [answer]) for choice in event["choices"]]
            for index, prompt in enumerate(prompts):
                own = [choice for choice in choices if choice["index"] == index]
                written = f"<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>"
                ids = server.post("/tokenize", {"prompt": written, "add_special_tokens": False}).json["tokens"]
                assert own[0]["prompt_token_ids"] == ids
                [same] = server.complete(ids, **fields)["choices"]
                assert "".join(choice["text"] for choice in own) == same["text"]
        options = {"temperature": 0, "num_predict": 3}
        body = {"model": "demo", "prompt": prompts[0], "suffix": suffix, "options": options, "stream": False}
        filled = server.post("/api/generate", body).json
        [same] = server.complete(prompts[0], suffix=suffix, max_tokens=3)["choices"]
        assert (filled["response"], filled["eval_count"]) == (same["text"], 3)
        assert "insert" in server.post("/api/show", {"model": "demo"}).json["capabilities"]
        assert server.complete("a", suffix="", max_tokens=1)["usage"]["prompt_tokens"] == 1
        for field, value in (("echo", True), ("truncate_prompt_tokens", 3)):
            answer = server.post("/v1/completions", {"prompt": "a", "suffix": "b", field: value})
            assert (answer.status, answer.error["param"]) == (400, field)
    finally:
        host.close()


def test_a_model_without_such_tokens_refuses_a_suffix(server):
    answer = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (answer.status, answer.error["param"]) == (400, "suffix")
    assert "no tokens for prompts with a gap" in answer.error["message"]
