"""Records what llama.cpp makes of texts with small vocabularies: gguf_tokenizers.json, which the tests compare with.

Run it where llama_cpp, gguf, tokenizers and sentencepiece are installed: python tests/data/record_gguf_tokenizers.py
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import llama_cpp
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

TEXTS = [
    "",
    " ",
    "  Hello world   a    b      c",
    "Hello, world! It's you'RE we'll 'Tis I'Ve HelloWorld XMLHttp",
    "\n\n\n  \n x\r\n\r\n\ty\t\t z \n ",
    "1 12 123 1234 12345 1234567890 3.14 1,000",
    "Äpfel Grüße café нещо на Български",
    "自然言語処理は楽しい。你好，世界！ 안녕하세요 ひらがな",
    "🚀 (normal) 😶‍🌫️ ✅ 🦙.cpp 👍🏽",
    "def f(x):\n\tif x == 1:\n\t\treturn [i**2 for i in range(10)]  # !!! ...\n",
    "<s> user</s>\n assistant <tool> x<tool><|end|> \ny<|endoftext|> z",
    "''''''```\"\"\"......!!!!!!?????? $$ ++ <=> ^^ ~~ || //\n/",
    "عربية ไทย ▁ under ▁▁ score \x00\x7f\u200b x\u3000",
    "कान្ពិ សេស",
]
CONTROL, USER_DEFINED, NORMAL = 3, 4, 1
APPROXIMATED = ("tekken", "gpt-4o", "kimi-k2")  # llama.cpp takes the marks of the last text for no part of a word here
PRE = (
    "default gpt-2 smollm llama-bpe glm4 dbrx qwen2 qwen35 falcon deepseek-llm deepseek-coder deepseek-v3 tekken "
    "gpt-4o kimi-k2"
).split()


def byte_level() -> dict[str, object]:
    """Merges trained without any splitting, so that each way of splitting shows."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=560, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, max_token_length=6
    )
    backend.train_from_iterator([*TEXTS, *(text.upper() for text in TEXTS)] * 4, trainer)
    model = json.loads(backend.to_str())["model"]
    special = ["<s>", "</s>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*sorted(model["vocab"], key=model["vocab"].__getitem__), *special],
        "tokenizer.ggml.token_type": [NORMAL] * len(model["vocab"]) + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(model["vocab"]),
        "tokenizer.ggml.eos_token_id": len(model["vocab"]) + 1,
    }


def sentencepiece_bpe() -> dict[str, object]:
    file = io.BytesIO()
    lines = [line for text in TEXTS[2:10] * 3 for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        model_type="bpe",
        vocab_size=470,
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        control_symbols=["<|end|>", "<|endoftext|>"],
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    ids = range(model.get_piece_size())
    kinds = [
        2
        if model.is_unknown(i)
        else 3
        if model.is_control(i)
        else 6
        if model.is_byte(i)
        else 4
        if model.id_to_piece(i) == "<tool>"
        else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
    }


def encode(metadata: dict[str, object], folder: Path) -> list[list[int]]:
    """llama.cpp's ids of the texts, special tokens parsed, BOS and EOS as the metadata say."""
    path = folder / "vocab.gguf"
    arch = metadata.get("general.architecture", "llama")
    writer = GGUFWriter(path, arch)
    writer.add_name("phi3" if arch == "phi3" else "test")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"{arch}.{key}", 64)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [llama.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]


def main() -> None:
    vocabularies = {"gpt2": byte_level(), "llama": sentencepiece_bpe()}
    ggml = "tokenizer.ggml"
    cases = [("gpt2", {f"{ggml}.pre": pre}) for pre in PRE] + [
        ("gpt2", {f"{ggml}.pre": "gpt-2", f"{ggml}.add_bos_token": True, f"{ggml}.add_eos_token": True}),
        ("llama", {}),
        ("llama", {f"{ggml}.add_space_prefix": False, f"{ggml}.add_bos_token": False, f"{ggml}.add_eos_token": True}),
        ("llama", {"general.architecture": "phi3"}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        recorded = [
            {"vocabulary": name, "metadata": more, "ids": encode(vocabularies[name] | more, Path(folder))}
            for name, more in cases
        ]
    for case in recorded:
        if case["metadata"].get(f"{ggml}.pre") in APPROXIMATED:
            case["ids"][-1] = None
    data = {"texts": TEXTS, "vocabularies": vocabularies, "cases": recorded}
    file = Path(__file__).with_name("gguf_tokenizers.json")
    file.write_text(json.dumps(data, ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
