"""Byte-level BPE: the regular expressions that split a text before merging, and a reader of vocab.json and merges.txt.

Tokens are spelled in GPT-2's alphabet, with one printable character per byte, as in tokenizer.json.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_TABLE: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SPLITS = {
    name: tuple("|".join(alternatives) for alternatives in expressions)
    for names, expressions in _TABLE.items()
    for name in names.split()
}
MOST_CUTS = 1_000_000_000  # ways to cut tokens in two, times their length: vocabularies have a hundredth of that
_COMPOSED = ("qwen2", "qwen35", "command-r", "mpt", "olmo")  # characters are composed first (NFC)


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splits: str | Sequence[str],
    *,
    ignore_merges: bool = False,
    add_prefix_space: bool = False,
) -> Backend:
    """Create a byte-level BPE tokenizer. Raises ValueError for a merge whose result is not a token.

    splits: a name in SPLITS, or the regular expressions themselves.
    ignore_merges: a word that is itself a token becomes that token, even if no sequence of merges leads to it.
    add_prefix_space: put a space in front of the text; works only with GPT-2's expression.
    """
    for left, right in merges:
        if left + right not in vocab:  # the library would panic, which is not an Exception
            raise ValueError(f"{left} and {right} are to be merged, but {left}{right} is no token")
    backend = Backend(models.BPE(dict(vocab), list(merges), ignore_merges=ignore_merges))
    if splits in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if add_prefix_space:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    else:
        splits = SPLITS[splits] if isinstance(splits, str) else splits
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def merges_of(tokens: Iterable[str]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary that only lists tokens in order of rank, as in tiktoken and SentencePiece.

    These libraries join the two neighbours whose union has the lowest rank. To reproduce this, a token gets one merge
    for each way to cut it into two tokens. The order of these merges does not matter: if a part of a text becomes a
    token, it is merged by the same steps as it would be alone, so the last merge is always the same one. Raises
    ValueError for tokens that would take minutes.
    """
    tokens = dict.fromkeys(tokens)
    if sum(len(token) ** 2 for token in tokens) > MOST_CUTS:
        raise ValueError("its tokens are too long")
    return [
        (left, right)
        for token in tokens
        for middle in range(1, len(token))
        if (left := token[:middle]) in tokens and (right := token[middle:]) in tokens
    ]


def read_vocab_and_merges(merges: Path, config: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Reads vocab.json and merges.txt from one directory (GPT-2, OPT, Qwen 2), and completes the configuration."""
    if not (vocabulary := merges.with_name("vocab.json")).is_file():
        raise ValueError("there is no vocab.json beside it")
    vocab, pairs = models.BPE.read_file(str(vocabulary), str(merges))
    vocab |= added_ids(config)
    name = family(config) or "gpt-2"
    backend = byte_level(vocab, pairs, name, add_prefix_space=bool(config.get("add_prefix_space")))
    names = ("eos_token", "unk_token", "bos_token" if name == "gpt-2" else "pad_token")
    end = "<|endoftext|>"
    return backend, {**dict.fromkeys(names, end), **config} if end in vocab else config


def family(config: Mapping[str, Any]) -> str | None:
    """Return the name in SPLITS for models whose expressions follow only from the name of their tokenizer class."""
    name = str(config.get("tokenizer_class")).lower()
    if name.startswith("qwen"):
        return "qwen2"
    return "kimi-k2" if name.startswith("tiktoken") else None


def added_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that tokenizer_config.json adds to the vocabulary: content → id."""
    return {token["content"]: int(token_id) for token_id, token in (config.get("added_tokens_decoder") or {}).items()}


def completed(config: Mapping[str, Any], named: Mapping[str, str], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the defaults of a vocabulary file: BOS is added by default.

    named: named special tokens that count if they are added tokens. added: all added tokens.
    """
    known = {token["content"] for token in added.values()}
    named = {name: token for name, token in named.items() if token in known}
    return {"add_bos_token": True, **named, **config, "added_tokens_decoder": added}
