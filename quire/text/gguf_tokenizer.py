"""The tokenizer that a GGUF file describes in its metadata.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What it leaves open follows llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from quire.metrics.logging import logger
from quire.text.bpe import SPLITS, byte_level
from quire.text.sentencepiece import Kind, Piece, SentencePieceModel, added_tokens

_IGNORE_MERGES = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken glm4".split())
_ADD_BOS = _IGNORE_MERGES - {"glm4"}
_OTHER_NAMES = {"unknown": "unk", "padding": "pad", "seperator": "sep"}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """A backend, and a configuration as in tokenizer_config.json, with the chat templates by name.

    metadata: the file's keys and values, with arrays as lists or numpy arrays. Raises ValueError, which names the key.
    """
    prefix = "tokenizer.ggml."
    ggml = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in ("model", "tokens"):
        if key not in ggml:
            raise ValueError(f"the GGUF file has no tokenizer.ggml.{key}")
    tokens: list[str] = list(ggml["tokens"])
    kinds: list[int] = np.asarray(ggml.get("token_type", [Kind.NORMAL] * len(tokens))).tolist()
    scores: list[float] = np.asarray(ggml.get("scores", [0.0] * len(tokens))).tolist()
    for key, values in (("token_type", kinds), ("scores", scores)):
        if len(values) != len(tokens):
            raise ValueError(f"tokenizer.ggml.{key} has {len(values)} values for {len(tokens)} tokens")
    if ggml["model"] == "llama":
        ids = {"bos": 1, "eos": 2, "unknown": 0}
        add_bos = True
        pieces = list(map(Piece, tokens, scores, kinds))
        unknown_id = int(ggml.get("unknown_token_id", 0))
        model = SentencePieceModel(pieces, unknown_id, dummy_prefix=bool(ggml.get("add_space_prefix", True)))
        backend, added = model.backend({})
        if metadata.get("general.architecture") == "phi3":
            # GGUF cannot express that a token includes the spaces after it.
            for token in added.values():
                token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    elif ggml["model"] == "gpt2":
        ids = {}
        pre = str(ggml.get("pre"))
        add_bos = pre in _ADD_BOS
        if pre not in SPLITS:
            logger.warning("The GGUF file's tokenizer.ggml.pre is %s, unknown to Quire; tokenization may be wrong", pre)
            pre = "default"
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ", 1)) for merge in ggml.get("merges", ())]
        backend = byte_level(vocab, merges, pre, ignore_merges=pre in _IGNORE_MERGES)
        added = added_tokens(zip(tokens, kinds, strict=True))
    else:
        raise ValueError(f"tokenizer.ggml.model is {ggml['model']!r}; Quire supports 'llama' and 'gpt2'")
    ids |= {match[1]: int(ggml[key]) for key in ggml if (match := re.fullmatch(r"(\w+)_token_id", key))}
    named = {f"{_OTHER_NAMES.get(name, name)}_token": tokens[i] for name, i in ids.items() if i < len(tokens)}
    return backend, {
        **named,
        "add_bos_token": bool(ggml.get("add_bos_token", add_bos)),
        "add_eos_token": bool(ggml.get("add_eos_token", False)),
        "added_tokens_decoder": added,
        "chat_template": gguf_chat_templates(metadata),
    }


def gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    return named | ({"default": metadata[prefix]} if prefix in metadata else {})
