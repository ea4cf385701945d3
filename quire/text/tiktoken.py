"""Vocabularies in which ranks are both ids and the merge order: tiktoken's files and Mistral's tekken.json."""

import binascii
from collections.abc import Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from quire.messages.errors import error_text
from quire.text.bpe import added_ids, byte_level, completed, family, merges_of
from quire.text.token_bytes import BYTE_OF_CHARACTER
from quire.text.tokenizer_check import check_expression

_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
# The special tokens of files from before 2025, which do not list them.
_EARLY_TEKKEN = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


def read_tiktoken(data: bytes, config: Mapping[str, Any]) -> Backend:
    """Reads lines with a base64 token and its rank (Llama 3's first release, GLM-4, Qwen 1, Kimi K2).

    Only tokenizer_config.json lists the special tokens.
    """
    vocab: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            vocab[_spell(binascii.a2b_base64(token))] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    merges = merges_of(sorted(vocab, key=vocab.__getitem__))
    return byte_level(vocab | added_ids(config), merges, family(config) or "llama-bpe", ignore_merges=True)


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _TekkenToken(msgspec.Struct):
    token_bytes: bytes  # base64 in the file


class _TekkenSpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenSpecialToken] | None = None


def read_tekken(data: bytes, config: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Reads tekken.json, and completes the configuration. The special tokens have the first ids, and the others follow
    by rank. BOS is added by default."""
    file = msgspec.json.decode(data, type=_Tekken)
    try:
        check_expression(file.config.pattern)
    except ValueError as error:
        raise ValueError(f"config.pattern {file.config.pattern[:100]!r} {error_text(error)}") from error
    size = file.config.default_vocab_size
    count = file.config.default_num_special_tokens
    ranked = sorted(file.special_tokens or (), key=lambda token: token.rank)
    specials = [token.token_str for token in ranked] or _EARLY_TEKKEN
    specials = specials + [f"<SPECIAL_{token_id}>" for token_id in range(len(specials), count)]
    tokens = [_spell(token.token_bytes) for token in file.vocab[: size - count]]
    vocab = {token: token_id for token_id, token in enumerate(tokens, count)}
    vocab |= {token: token_id for token_id, token in enumerate(specials)}
    backend = byte_level(vocab | added_ids(config), merges_of(tokens), [file.config.pattern], ignore_merges=True)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    added = {str(token_id): {"content": token, "special": True} for token_id, token in enumerate(specials)}
    return backend, completed(config, named, {**added, **(config.get("added_tokens_decoder") or {})})


def _spell(token: bytes) -> str:
    return token.decode("latin-1").translate(_CHARACTER_OF_BYTE)
