"""Tiny tokenizers, trained here, in the formats of the models people run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

from quire.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's hers, isn't it? Don't!",
    "and the cat and the hat and the bat",
    "Grüße aus Köln: naïve café, señor, Ångström 1234567890",
    "自然言語処理は楽しい。你好，世界！ 안녕하세요",
    "emoji 👍🏽 👩‍👩‍👧 🇩🇪 and e\u0301 combining, tabs\tand\nnewlines  and   spaces",
    "<html> { } def f(x): return x + 1 # comment",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Backend:
    """As GPT-2, Llama 3, Qwen: BPE over bytes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool_call>"])
    return backend


def sentencepiece() -> Backend:
    """As Llama 2, Mistral 7B: BPE over characters with ▁ for a space, bytes for unknown characters, BOS in front."""
    source = Backend(models.BPE())
    source.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=520, special_tokens=SPECIAL[:3] + bytes_ + SPECIAL[3:], show_progress=False)
    source.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    state = json.loads(source.to_str())
    state["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    state["pre_tokenizer"] = None
    backend = Backend.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def unigram() -> Backend:
    """As T5: SentencePiece's Unigram model with the Metaspace decoder."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece() -> Backend:
    """As BERT."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(CORPUS, WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return backend


BACKENDS = {"byte level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram, "word piece": word_piece}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "<pad>"}


class Checkpoints:
    """Writes checkpoint directories and reads them with Quire and with transformers."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0

    def write(self, backend: Backend, config: dict | None = None, **files: str | dict) -> Path:
        """`files` maps a name with its dot written as two underscores to a text or a JSON value."""
        self._count += 1
        path = self._root / str(self._count)
        path.mkdir()
        backend.save(str(path / "tokenizer.json"))
        for name, content in {"tokenizer_config__json": CONFIG if config is None else config, **files}.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name.replace("__", ".")).write_text(text, "utf-8")
        return path

    def both(self, *args, **kwargs) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
        path = self.write(*args, **kwargs)
        return Tokenizer.from_directory(path), PreTrainedTokenizerFast.from_pretrained(path)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Writes files, JSON from what is neither text nor bytes, into a directory of their own."""

    def write(files: dict[str, Any]) -> Path:
        path = tmp_path_factory.mktemp("files")
        for name, content in files.items():
            content = content if isinstance(content, str | bytes) else json.dumps(content)
            (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def backends() -> dict[str, Backend]:
    return {kind: build() for kind, build in BACKENDS.items()}


@pytest.fixture(scope="session", params=BACKENDS)
def pair(request, checkpoints, backends) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The same checkpoint read by Quire and by transformers, for each kind of tokenizer."""
    return checkpoints.both(backends[request.param])


@pytest.fixture(scope="session", params=BACKENDS)
def tokenizer(request, checkpoints, backends) -> Tokenizer:
    return Tokenizer.from_directory(checkpoints.write(backends[request.param]))


@pytest.fixture(scope="session")
def byte_level_tokenizer(checkpoints, backends) -> Tokenizer:
    return Tokenizer.from_directory(checkpoints.write(backends["byte level"]))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(checkpoints, backends) -> Tokenizer:
    return Tokenizer.from_directory(checkpoints.write(backends["sentencepiece"]))
