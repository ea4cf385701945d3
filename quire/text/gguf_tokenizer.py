"""The tokenizer that a GGUF file describes in its metadata.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Unspecified behaviour follows llama.cpp.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

from quire.observability.logging import logger
from quire.text.bpe import MOST_CUTS, SPLITS, byte_level
from quire.text.partial_backend import BpeVocabulary, ListedMerges, PartialBackend, ScoredMerges
from quire.text.sentencepiece import Kind, Piece, SentencePieceModel, added_tokens, as_matched
from quire.text.strings import Strings

_IGNORE_MERGES = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken glm4".split())
_ADD_BOS = _IGNORE_MERGES - {"glm4"}
_LARGE = 10_000  # tokens
_OTHER_NAMES = {"unknown": "unk", "padding": "pad", "seperator": "sep"}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> tuple[Backend | PartialBackend, dict[str, Any]]:
    """Return a backend, and a configuration as in tokenizer_config.json, with the chat templates by name.

    metadata: the file's keys and values, with arrays as sequences. Raises ValueError that names the key.
    """
    prefix = "tokenizer.ggml."
    ggml = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in ("model", "tokens"):
        if key not in ggml:
            raise ValueError(f"the GGUF file has no tokenizer.ggml.{key}")
    tokens = _strings(ggml["tokens"])
    kinds = np.asarray(ggml.get("token_type", [Kind.NORMAL] * len(tokens)))
    scores = np.asarray(ggml.get("scores", [0.0] * len(tokens)))
    for key, values in (("token_type", kinds), ("scores", scores)):
        if len(values) != len(tokens):
            raise ValueError(f"tokenizer.ggml.{key} has {len(values)} values for {len(tokens)} tokens")
    matched = np.flatnonzero(np.isin(kinds, (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)))
    added = added_tokens(zip(matched.tolist(), tokens.pick(matched), kinds[matched].tolist(), strict=True))
    backend: Backend | PartialBackend
    if ggml["model"] == "llama":
        ids = {"bos": 1, "eos": 2, "unknown": 0}
        add_bos = True
        unknown_id = int(ggml.get("unknown_token_id", 0))
        backend, added = _sentencepiece(
            tokens, scores, kinds, unknown_id, bool(ggml.get("add_space_prefix", True)), added
        )
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
        backend = _byte_level(tokens, _strings(ggml.get("merges", ())), pre)
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


def _strings(texts: Any) -> Strings:
    return texts if isinstance(texts, Strings) else Strings.of(texts)


def _byte_level(tokens: Strings, merges: Strings, pre: str) -> Backend | PartialBackend:
    ignores_merges = pre in _IGNORE_MERGES

    def complete() -> Backend:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        return byte_level(vocab, pairs, pre, ignore_merges=ignores_merges)

    if not _can_be_partial(tokens):
        return complete()
    vocabulary = BpeVocabulary(tokens, ListedMerges(tokens, merges), {"ignore_merges": ignores_merges}, {})
    return PartialBackend(vocabulary, byte_level({}, [], pre), complete)


def _sentencepiece(
    tokens: Strings,
    scores: npt.NDArray[Any],
    kinds: npt.NDArray[Any],
    unknown_id: int,
    dummy_prefix: bool,
    added: dict[str, dict[str, Any]],
) -> tuple[Backend | PartialBackend, dict[str, Any]]:
    """added: the added tokens, whose texts are replaced by those in the backend."""

    def model(pieces: list[Piece]) -> SentencePieceModel:
        return SentencePieceModel(pieces, unknown_id, dummy_prefix=dummy_prefix)

    def complete() -> tuple[Backend, dict[str, Any]]:
        return model(list(map(Piece, tokens, scores.tolist(), kinds.tolist()))).backend({})

    renamed = as_matched(added)
    if not _can_be_partial(tokens) or np.isnan(scores).any():
        return complete()
    others = {*tokens.find(Strings.of(renamed.values())).tolist()} - {-1, *renamed}
    if others or len({*renamed.values()}) < len(renamed):  # two tokens have the same text
        return complete()
    can_join = np.isin(kinds, (Kind.NORMAL, Kind.UNUSED))
    unknown = renamed.get(unknown_id, tokens[unknown_id] if 0 <= unknown_id < len(tokens) else None)
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    vocabulary = BpeVocabulary(tokens, ScoredMerges(tokens, scores, can_join), options, renamed)
    shape, _ = model([]).backend({})
    return PartialBackend(vocabulary, shape, lambda: complete()[0]), added


def _can_be_partial(tokens: Strings) -> bool:
    """Return the whole vocabulary as a model of the library, for small or unusual vocabularies."""
    is_large = len(tokens) >= _LARGE and int((tokens.lengths**2).sum()) <= MOST_CUTS
    return is_large and tokens.can_be_searched


def gguf_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    return named | ({"default": metadata[prefix]} if prefix in metadata else {})
