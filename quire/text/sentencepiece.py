"""SentencePiece models, and a reader of tokenizer.model that does not need SentencePiece's library.

Format: sentencepiece_model.proto of https://github.com/google/sentencepiece.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text.bpe import completed, merges_of
from quire.text.tokenizer_check import LONGEST_PIECE, MOST_GROWTH, charsmap_growth


class Kind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    text: str  # ▁ is a space
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary of SentencePiece, and how it treats text.

    dummy_prefix: put a space in front of a text; in legacy mode, also in front of the text after each added token
    strip_spaces: drop spaces at both ends of a text, and reduce several spaces in a row to one
    charsmap: the normalization of characters, in the compiled form of SentencePiece's library
    """

    pieces: list[Piece]
    unknown_id: int = 0
    is_unigram: bool = False
    byte_fallback: bool = True
    dummy_prefix: bool = True
    legacy: bool = True
    strip_spaces: bool = False
    charsmap: bytes = b""

    def backend(self, listed: Mapping[str, Any]) -> tuple[Backend, dict[str, Any]]:
        """Return a backend and all its added tokens. listed: the added tokens of tokenizer_config.json, which may
        rename pieces."""
        added = added_tokens((i, piece.text, piece.kind) for i, piece in enumerate(self.pieces))
        added |= {token_id: dict(token) for token_id, token in listed.items()}
        as_matched(added)
        texts = dict(enumerate(piece.text for piece in self.pieces))
        texts |= {int(token_id): token["content"] for token_id, token in added.items()}
        backend = Backend(self._unigram(texts) if self.is_unigram else self._bpe(texts))
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.strip_spaces:
            steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
        if self.dummy_prefix and self.legacy:
            steps.append(normalizers.Prepend("▁"))
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        if self.dummy_prefix and not self.legacy:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        strip = [decoders.Strip(" ", 1, 0)] if self.dummy_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend, added

    def _unigram(self, texts: Mapping[int, str]) -> models.Model:
        scored = [(texts[token_id], piece.score) for token_id, piece in enumerate(self.pieces)]
        return models.Unigram(scored, self.unknown_id, self.byte_fallback)

    def _bpe(self, texts: Mapping[int, str]) -> models.Model:
        """Return BPE that joins the neighbours whose union is the piece with the highest score."""
        joinable = (Kind.NORMAL, Kind.UNUSED)
        ranked = [p for i, p in enumerate(self.pieces) if p.kind in joinable and p.text == texts[i]]
        ranked.sort(key=lambda piece: -piece.score)
        return models.BPE(
            {text: token_id for token_id, text in texts.items()},
            merges_of(piece.text for piece in ranked),
            unk_token=texts.get(self.unknown_id),
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )


def added_tokens(tokens: Iterable[tuple[int, str, int]]) -> dict[str, dict[str, Any]]:
    """Return the tokens that are matched in a text before it is split: id → entry, as in tokenizer_config.json.

    tokens: id, text and kind of each
    """
    return {
        str(token_id): {"content": text, "special": kind != Kind.USER_DEFINED, "normalized": False}
        for token_id, text, kind in tokens
        if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
    }


def as_matched(added: dict[str, dict[str, Any]]) -> dict[int, str]:
    """Replace the texts of added tokens for spaces by the form before normalization, in which they are matched. Returns
    the new texts."""
    renamed = {}
    for token_id, token in added.items():
        if not token["content"].strip("▁"):
            token["content"] = " " * len(token["content"])
            renamed[int(token_id)] = token["content"]
    return renamed


def read_sentencepiece(data: bytes, config: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Reads tokenizer.model, and completes the configuration. By default BOS is added but not EOS, as for Llama."""
    pieces: list[Piece] = []
    trainer = dict[int, Any]()
    normalizer = dict[int, Any]()
    for number, value in _fields(data):
        fields = dict(_fields(value))
        if number == 1:
            pieces.append(Piece(fields[1].decode(), fields.get(2, 0.0), fields.get(3, Kind.NORMAL)))
        elif number == 2:
            trainer = fields
        elif number == 3:
            normalizer = fields
    if (kind := trainer.get(3, 1)) not in (1, 2):
        raise ValueError("its model is of words or characters; Quire supports SentencePiece's Unigram and BPE")
    if trainer.get(24, 0):
        raise ValueError("treat_whitespace_as_suffix is not supported")
    charsmap = normalizer.get(2, b"")
    if charsmap_growth(charsmap) > MOST_GROWTH:
        message = f"normalizer_spec.precompiled_charsmap may make a text more than {MOST_GROWTH} times as long"
        raise ValueError(message)
    if (longest := max((len(piece.text) for piece in pieces), default=0)) > LONGEST_PIECE:
        raise ValueError(f"it has a piece of {longest:,} characters; at most {LONGEST_PIECE:,} are allowed")
    prefix = config.get("add_prefix_space")
    backend, added = SentencePieceModel(
        pieces,
        unknown_id=next((i for i, piece in enumerate(pieces) if piece.kind == Kind.UNKNOWN), 0),
        is_unigram=kind == 1,
        byte_fallback=bool(trainer.get(35, 0)),
        dummy_prefix=bool(normalizer.get(3, 1) if prefix is None else prefix),
        legacy=config.get("legacy") is not False,  # older checkpoints omit it, and are legacy
        strip_spaces=bool(normalizer.get(4, 1)),
        charsmap=charsmap,
    ).backend(config.get("added_tokens_decoder") or {})
    # The fields 45 to 48, and their defaults.
    tokens = {"unk_token": b"<unk>", "bos_token": b"<s>", "eos_token": b"</s>", "pad_token": b"<pad>"}
    named = {name: trainer.get(45 + i, default).decode() for i, (name, default) in enumerate(tokens.items())}
    return backend, completed(config, named, added)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the (number, value) pairs of a Protocol Buffers message: integers, 32-bit floats, bytes, and nested
    messages as bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while position < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            size = varint()
            position += size
            yield tag >> 3, message[position - size : position]
        elif tag & 7 == 5:
            yield tag >> 3, struct.unpack_from("<f", message, position)[0]
            position += 4
        else:
            raise ValueError(f"not a SentencePiece model: wire type {tag & 7} at byte {position}")
    if position > len(message):
        raise ValueError("the file is cut off")
