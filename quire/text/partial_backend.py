"""A tokenizer for a large vocabulary that is ready at once: it builds small vocabularies of the tokens that a text can
contain.

The library takes half a second or more for a vocabulary of 262,144 tokens, during which it holds the interpreter's
lock.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding, models
from tokenizers import Tokenizer as Backend

from quire.text.kept_arrays import kept_arrays
from quire.text.strings import Places, Strings

_MOST_CHARACTERS = 20_000  # of all texts that are encoded with small vocabularies
_MOST_DECODED = 2_000  # calls
_MOST_PARTS = 200_000  # substrings of a text that may be tokens


class Merges(Protocol):
    """The merges of a BPE vocabulary."""

    def into(self, ids: npt.NDArray[np.int64]) -> list[tuple[str, str]]:
        """Return the merges whose results are these tokens, in order of rank."""


class ListedMerges:
    """Merges as a list in order of rank, each as two tokens with a space between.

    Raises ValueError for a merge that is not two tokens, or whose result is not a token.
    """

    def __init__(self, tokens: Strings, merges: Strings) -> None:
        self._merges = merges
        sources = [part for strings in (tokens, merges) for part in (strings.data, strings.starts, strings.lengths)]
        lengths = len(merges), len(tokens) + 1
        self._ranks, self._first = kept_arrays("merges 1", sources, lengths, lambda: _by_result(tokens, merges))

    def into(self, ids: npt.NDArray[np.int64]) -> list[tuple[str, str]]:
        ranges = [self._ranks[self._first[i] : self._first[i + 1]] for i in ids.tolist()]
        ranks = np.sort(np.concatenate(ranges)) if ranges else np.empty(0, np.int64)
        return [(left, right) for left, _, right in (text.partition(" ") for text in self._merges.pick(ranks))]


def _by_result(tokens: Strings, merges: Strings) -> tuple[Places, Places]:
    """Return the ranks of all merges in order of the resulting tokens' ids, and the index of the first for each id.

    Raises ValueError for a merge that is not two tokens, or whose result is not a token.
    """
    stops = merges.starts + merges.lengths
    spaces = np.append(np.flatnonzero(merges.data == ord(" ")), len(merges.data))
    cuts = spaces[np.searchsorted(spaces, merges.starts)] if len(merges) else merges.starts
    if len(wrong := np.flatnonzero(cuts >= stops)):
        raise ValueError(f"{merges[int(wrong[0])]!r} is no merge of two tokens")
    order = np.argsort(merges.starts)  # the data without spaces contains the results
    kept = np.ones(len(merges.data), bool)
    kept[cuts] = False
    moved = np.empty(len(merges), np.int64)
    moved[order] = np.arange(len(merges))
    results = tokens.find(Strings(merges.data[kept], merges.starts - moved, merges.lengths - 1))
    if len(wrong := np.flatnonzero(results < 0)):
        left, _, right = merges[int(wrong[0])].partition(" ")
        raise ValueError(f"{left} and {right} are to be merged, but {left}{right} is no token")
    for part in (
        Strings(merges.data, merges.starts, cuts - merges.starts),
        Strings(merges.data, cuts + 1, stops - cuts - 1),
    ):
        if len(wrong := np.flatnonzero(tokens.find(part) < 0)):
            raise ValueError(f"{part[int(wrong[0])]!r} is to be merged, but is no token")
    ranks = np.argsort(results, kind="stable")
    return ranks, np.searchsorted(results[ranks], np.arange(len(tokens) + 1))


class ScoredMerges:
    """SentencePiece's merges: the neighbours whose union has the highest score are joined. can_join: whether a token
    may be such a union."""

    def __init__(self, tokens: Strings, scores: npt.NDArray[Any], can_join: npt.NDArray[np.bool_]) -> None:
        self._tokens = tokens
        self._scores = scores
        self._can_join = can_join

    def into(self, ids: npt.NDArray[np.int64]) -> list[tuple[str, str]]:
        ids = np.sort(ids[self._can_join[ids]])
        ranked = dict.fromkeys(self._tokens.pick(ids[np.argsort(-self._scores[ids], kind="stable")]))
        return [
            (left, right)
            for token in ranked
            for middle in range(1, len(token))
            if (left := token[:middle]) in ranked and (right := token[middle:]) in ranked
        ]


@dataclass(frozen=True)
class BpeVocabulary:
    """The model of a tokenizer.

    renamed: id → text, of tokens whose text differs from `tokens`; these are never merged. options: of the library's
    model.
    """

    tokens: Strings
    merges: Merges
    options: Mapping[str, Any]
    renamed: Mapping[int, str]

    def find(self, texts: Strings) -> Places:
        found = self.tokens.find(texts)
        if self.renamed:
            found[np.isin(found, list(self.renamed))] = -1
        return found

    def text(self, token_id: int) -> str | None:
        if (text := self.renamed.get(token_id)) is not None:
            return text
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def id_of(self, text: str) -> int | None:
        return self.ids_of([text])[0]

    def ids_of(self, texts: Sequence[str]) -> list[int | None]:
        """Return the texts of tokens, some of which may have been renamed."""
        found = self.find(Strings.of(texts)).tolist()
        new_names = {name: token_id for token_id, name in self.renamed.items()}
        return [i if i >= 0 else new_names.get(text) for i, text in zip(found, texts, strict=True)]

    def has_all(self, texts: Sequence[str]) -> bool:
        return None not in self.ids_of(texts)

    def longest(self, in_characters: bool) -> int:
        """Return the length of the longest token in characters or bytes."""
        kept = np.ones(len(self.tokens), bool)
        kept[list(self.renamed)] = False
        tokens = Strings(self.tokens.data, self.tokens.starts[kept], self.tokens.lengths[kept])
        new_names = [len(name) if in_characters else len(name.encode()) for name in self.renamed.values()]
        return max(tokens.longest_text if in_characters else tokens.longest, *new_names, 0)


class PartialBackend:
    """Implements the methods of the library's Tokenizer that Quire uses, with the same results.

    A text is encoded with a vocabulary of all tokens that occur in it, and of the merges that produce them: no others
    could be used. Ids are decoded with a vocabulary of these ids. After many texts or a long one, and for methods that
    need it, the library loads the whole vocabulary.

    shape: the library's tokenizer, whose model is replaced. complete: creates the tokenizer with the whole vocabulary.
    Its added tokens must be in the vocabulary, and are matched before a text is normalized.
    """

    def __init__(self, vocabulary: BpeVocabulary, shape: Backend, complete: Callable[[], Backend]) -> None:
        self.vocabulary = vocabulary
        self._shape = shape
        self._make_complete = complete
        self._shape.model = models.BPE({}, [], **vocabulary.options)
        self._added: dict[int, AddedToken] = {}
        self._complete: Backend | None = None
        self._lock = threading.RLock()
        self._characters = self._decoded = 0
        always = [f"<0x{byte:02X}>" for byte in range(256)] if vocabulary.options.get("byte_fallback") else []
        unknown = vocabulary.options.get("unk_token")
        always = [*always, *([] if unknown is None else [unknown])]
        found = zip(always, vocabulary.ids_of(always), strict=True)
        self._always = {text: token_id for text, token_id in found if token_id is not None}

    # ---- the vocabulary

    @property
    def normalizer(self) -> Any:
        return self._shape.normalizer

    @property
    def pre_tokenizer(self) -> Any:
        return self._shape.pre_tokenizer

    @property
    def post_processor(self) -> Any:
        return self._shape.post_processor

    @property
    def model(self) -> Any:
        """Has no vocabulary."""
        return self._shape.model

    def no_truncation(self) -> None:
        """It never truncates."""

    def no_padding(self) -> None:
        """It never pads."""

    def add_tokens(self, tokens: Sequence[AddedToken]) -> int:
        before = len(self._added)
        ids = self.vocabulary.ids_of([token.content for token in tokens])
        for token_id, token in zip(ids, tokens, strict=True):
            if token_id is None or token.normalized:
                raise ValueError(f"the added token {token.content!r} is not one of the vocabulary")
            if token.content:  # which the library ignores
                self._added[token_id] = token
        return len(self._added) - before

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self._added)

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        vocab: dict[str, int] = self.complete().get_vocab(with_added_tokens)
        return vocab

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self.vocabulary.tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.vocabulary.id_of(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self.vocabulary.text(token_id)

    def to_str(self) -> str:
        text: str = self.complete().to_str()
        return text

    def complete(self) -> Backend:
        """Return the library's tokenizer with the whole vocabulary, which is used from now on."""
        with self._lock:
            if self._complete is None:
                backend = self._make_complete()
                backend.add_tokens(list(self._added.values()))
                self._complete = backend
            return self._complete

    def complete_beside(self) -> None:
        """Start creating the complete tokenizer in a thread, so that no request has to wait for it."""
        threading.Thread(target=self.complete, name="quire-vocabulary", daemon=True).start()

    # ---- texts and ids

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        return self._for_texts([text]).encode(text, add_special_tokens=add_special_tokens)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        backend = self._for_texts(texts)
        encodings: list[Encoding] = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings

    def post_process(self, encoding: Encoding, pair: Encoding | None, add_special_tokens: bool) -> Encoding:
        return self._shape.post_process(encoding, pair, add_special_tokens)

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        count: int = self._shape.num_special_tokens_to_add(is_pair)
        return count

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._for_ids([ids]).decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        backend = self._for_ids(sequences)
        texts: list[str] = backend.decode_batch(list(sequences), skip_special_tokens=skip_special_tokens)
        return texts

    def _for_ids(self, sequences: Sequence[Sequence[int]]) -> Backend:
        self._decoded += 1
        if self._complete is not None or self._decoded > _MOST_DECODED:
            return self.complete()
        ids = {token_id for sequence in sequences for token_id in sequence}
        vocab = {text: i for i in ids if isinstance(i, int) and (text := self.vocabulary.text(i)) is not None}
        return self._backend(vocab, [], [self._added[i] for i in sorted(self._added.keys() & ids)])

    def _for_texts(self, texts: Sequence[str]) -> Backend:
        texts = [text for text in texts if _is_valid(text)]  # the library rejects others
        self._characters += sum(map(len, texts))
        if self._complete is not None or self._characters > _MOST_CHARACTERS:
            return self.complete()
        added = {i: token for i, token in self._added.items() if any(token.content in text for text in texts)}
        words = {word for text in texts for word in self._words(text, list(added.values()))}
        parts = _parts(words, self.vocabulary.tokens.longest_text)
        if parts is None:
            return self.complete()
        found = {*self.vocabulary.find(parts).tolist()} - {-1}
        ids = np.array(sorted(found), np.int64)  # np.unique would import numpy's masked arrays, which takes 10 ms
        vocab = dict(zip(self.vocabulary.tokens.pick(ids), ids.tolist(), strict=True))
        vocab |= self._always | {token.content: i for i, token in added.items()}
        return self._backend(vocab, self.vocabulary.merges.into(ids), [added[i] for i in sorted(added)])

    def _words(self, text: str, added: list[AddedToken]) -> Iterable[str]:
        """Return the parts of a text that the model receives."""
        for piece in _between(text, added):
            if self.normalizer is not None:
                piece = self.normalizer.normalize_str(piece)
            if self.pre_tokenizer is None:
                yield piece
            else:
                yield from (word for word, _ in self.pre_tokenizer.pre_tokenize_str(piece))

    def _backend(self, vocab: dict[str, int], merges: list[tuple[str, str]], added: list[AddedToken]) -> Backend:
        backend = Backend(models.BPE(vocab, merges, **self.vocabulary.options))
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self._shape, part)) is not None:
                setattr(backend, part, value)
        backend.add_tokens(added)
        return backend


def _is_valid(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _between(text: str, added: list[AddedToken]) -> list[str]:
    """Return the pieces of a text between added tokens."""
    if not added:
        return [text]
    splitter = Backend(models.BPE({}, []))  # finds no other tokens
    splitter.add_tokens(added)
    offsets = splitter.encode(text, add_special_tokens=False).offsets
    pieces = []
    end = 0
    for start, stop in offsets:
        pieces.append(text[end:start])
        end = stop
    return [*pieces, text[end:]]


def _parts(words: Iterable[str], longest: int) -> Strings | None:
    """Return all substrings of these words, up to a maximum length in characters. None if there are too many."""
    strings = Strings.of(word for word in words if word)
    if not len(strings):
        return strings
    data = strings.data
    begins = np.flatnonzero((data & 0xC0) != 0x80)  # of characters
    ends = np.append(begins[1:], len(data))
    word_of = np.searchsorted(strings.starts, begins, "right")
    starts = []
    lengths = []
    count = 0
    for size in range(1, min(longest, len(begins)) + 1):
        whole = word_of[: len(begins) - size + 1] == word_of[size - 1 :]
        if not whole.any():
            break
        first = begins[: len(whole)][whole]
        starts.append(first)
        lengths.append(ends[size - 1 :][whole] - first)
        count += len(first)
        if count > _MOST_PARTS:
            return None
    return Strings(data, np.concatenate(starts), np.concatenate(lengths))
