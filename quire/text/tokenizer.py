"""A checkpoint's tokenizer in any of its formats, with the special tokens and chat templates of its other files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.messages.errors import error_text
from quire.platform.files import MIB, read_bytes
from quire.text.bpe import read_vocab_and_merges
from quire.text.encoding import SHORT_TEXT, ConfinedEncoder, text_encoder
from quire.text.gguf_tokenizer import gguf_tokenizer
from quire.text.length_bound import LengthBound
from quire.text.partial_backend import PartialBackend
from quire.text.sentencepiece import read_sentencepiece
from quire.text.tiktoken import read_tekken, read_tiktoken
from quire.text.token_bytes import TokenBytes, is_fault
from quire.text.tokenizer_check import MOST_BYTES, check_tokenizer, vocabulary_size

# In order of precedence. merges.txt needs vocab.json. tokenizer.model may be a SentencePiece or a tiktoken file.
_FILES = ("tokenizer.json", "tekken.json", "merges.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken")
_TEMPLATE = 4 * MIB  # bytes of a chat template
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back, as transformers 5 does with the same directory.

    There are two differences. A BOS or EOS token that tokenizer_config.json asks for is added even if tokenizer.json
    does not add it, as in transformers 4. And a tokenizer.model is read as SentencePiece reads it.

    special_tokens: the named special tokens, {"bos_token": "<s>", ...}; they are variables of the chat template
    extra_special_tokens: the special tokens without a name
    all_special_ids: the ids that `decode(skip_special_tokens=True)` leaves out
    added_tokens: id → content of the tokens that are matched in a text before the model splits it
    chat_templates: name → template; most checkpoints have only "default", some also "tool_use"
    """

    def __init__(
        self, backend: Backend | PartialBackend, config: dict[str, Any], chat_templates: dict[str, str]
    ) -> None:
        # A checkpoint may have been saved with a training configuration that truncates or pads.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = _special_tokens(config)
        self.extra_special_tokens = _extra_special_tokens(config)
        _add_missing_tokens(backend, config)
        self._backend = backend
        self.chat_templates = chat_templates
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        # The clean-up is meant for WordPiece. transformers 5 never applies it to BPE, regardless of the configuration.
        self._clean_up = bool(config.get("clean_up_tokenization_spaces")) and type(backend.model).__name__ != "BPE"
        plain = backend.encode("a", add_special_tokens=False).ids
        framed = backend.encode("a").ids
        has_bos = framed != plain and framed[:1] == [self.bos_token_id]
        has_eos = framed != plain and framed[-1:] == [self.eos_token_id]
        bos = self.bos_token_id
        eos = self.eos_token_id
        prefix = [bos] if config.get("add_bos_token") and bos is not None and not has_bos else []
        suffix = [eos] if config.get("add_eos_token") and eos is not None and not has_eos else []
        self._encoder = text_encoder(backend, prefix, suffix)

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """Raises FileNotFoundError if there is no tokenizer file, ValueError if a file cannot be read."""
        path = Path(path)
        config = _read_json(path / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # written since 2023, and takes precedence
            config |= _read_json(path / "special_tokens_map.json")
        file = next((file for name in _FILES for file in sorted(path.glob(name))), None)
        if file is None:
            raise FileNotFoundError(f"no tokenizer in {path}: looked for {', '.join(_FILES)}")
        if file.name != "tokenizer.json":
            ids = _read_json(path / "added_tokens.json")
            config.setdefault("added_tokens_decoder", {str(ids[token]): {"content": token} for token in ids})
            config.setdefault("tokenizer_class", _read_json(path / "config.json").get("model_type"))
        with _reading(file):
            backend, config = _read(file, config)
        with _reading(path / "tokenizer_config.json"):
            msgspec.convert(config, _Config)
            return cls(backend, config, read_chat_templates(path, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Read the tokenizer and the chat templates of a GGUF file, from its keys and values. Raises ValueError."""
        with _reading("the GGUF file's tokenizer"):
            backend, config = gguf_tokenizer(metadata)
            msgspec.convert(config, _Config)
            return cls(backend, config, config["chat_template"])

    @property
    def backend(self) -> Backend | PartialBackend:
        """The object of the tokenizers library, or one that reads a large vocabulary in parts."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Raises ValueError for text without tokens, and for invalid Unicode: a lone surrogate, which
        JSON's backslash-u escapes can produce.

        A tokenizer that may take quadratic time encodes longer texts in a worker process. It raises ValueError for a
        text that takes too long, and BusyError if other texts use up the time.
        """
        return self._encoder.encode(text, add_special_tokens)

    def encode_parts(
        self,
        first: str,
        second: str | None,
        keep: int | None = None,
        add_special_tokens: bool = True,
        from_left: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of one or two texts with the special tokens between and around them, and for each token
        the number of its text, 0 or 1. At most `keep` tokens are returned: the longer text is cut at the end, or with
        from_left at the beginning. Raises ValueError."""
        return self._encoder.encode_parts(first, second, keep, add_special_tokens, from_left)

    def shortened(self, text: str, most: int) -> str:
        """Return the beginning of a text, with at most `most` tokens. Raises ValueError."""
        return self._encoder.shortened(text, most)

    @property
    def longest_quick(self) -> int | None:
        """The length in characters up to which any text is encoded quickly. None if encoding always takes linear
        time."""
        return SHORT_TEXT if isinstance(self._encoder, ConfinedEncoder) else None

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens, without tokenizing. 0 if the tokenizer allows no bound."""
        return 0 if self.length_bound is None else self.length_bound.fewest_tokens(text)

    def pieces(self, text: str, add_special_tokens: bool) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them. Parts without a token are spelled as in the
        text."""
        return self._encoder.pieces(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode tokens. Raises ValueError if the decoder of the tokenizer fails on them."""
        try:
            [text] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if is_fault(error):
                raise ValueError(f"the tokenizer cannot decode these tokens: {error_text(error)}") from error
            raise
        return _clean_up_spaces(text) if self._clean_up else text

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it ("Ġthe", "▁the"). `token_bytes` contains its text."""
        return self._backend.id_to_token(token_id)

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def get_vocab(self) -> dict[str, int]:
        """Token, as the vocabulary spells it → id. Includes the added tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    def count(self, with_added_tokens: bool) -> int:
        """Return the number of tokens in the vocabulary. It may be less than `vocab_size`."""
        return self._backend.get_vocab_size(with_added_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. Not every id below it needs to have a token. Raises ValueError."""
        return vocabulary_size(self._backend)

    @cached_property
    def length_bound(self) -> LengthBound | None:
        """None if the tokenizer allows no bound. The first use may take a tenth of a second for a large vocabulary."""
        return LengthBound.of(self._backend)

    def prepare(self) -> None:
        """Prepare now to avoid delays of requests later. Slow parts continue in a thread."""
        _ = self.length_bound
        if isinstance(self._backend, PartialBackend):
            self._backend.complete_beside()

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The fields of tokenizer_config.json that are read here. Used only to check their types."""

    added_tokens_decoder: dict[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")], _Token] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    additional_special_tokens: list[Any] | dict[str, Any] | None = None
    chat_template: str | dict[str, str] | list[_NamedTemplate] | None = None


@contextmanager
def _reading(what: object) -> Iterator[None]:
    """Convert every error to ValueError."""
    try:
        yield
    except BaseException as error:
        if is_fault(error):
            raise ValueError(f"cannot read {what}: {error_text(error)}") from error
        raise


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(file, MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file}: {error_text(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {file}: expected a JSON object, found {type(value).__name__}")
    return value


def _read(file: Path, config: dict[str, Any]) -> tuple[Backend, dict[str, Any]]:
    """Return a backend, and the configuration with the defaults of the file's format."""
    if file.name == "tokenizer.json":
        return Backend.from_buffer(check_tokenizer(file)), config
    if file.name == "merges.txt":
        return read_vocab_and_merges(file, config)
    data = read_bytes(file, MOST_BYTES)
    if file.name == "tekken.json":
        return read_tekken(data, config)
    if data.startswith(b"\n"):  # the tag of a SentencePiece model's first piece
        return read_sentencepiece(data, config)
    return read_tiktoken(data, config), config


def _content(token: Any) -> str | None:
    """A special token is written as "<s>" or as {"content": "<s>", "lstrip": false, ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: config[name] for name in _NAMED_TOKENS if name in config}
    # Some models have additional named tokens, such as image_token.
    named |= {name: token for name, token in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {name: content for name, token in named.items() if (content := _content(token)) is not None}


def _extra_special_tokens(config: dict[str, Any]) -> list[str]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    contents = () if isinstance(extra, dict) else map(_content, extra)
    return [content for content in contents if content is not None]


def _add_missing_tokens(backend: Backend | PartialBackend, config: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists; they get ids in transformers' order.

    A token that is not special in tokenizer.json stays so even if it is listed as special. Otherwise decoding would
    lose the <tool_call> that a parser waits for.
    """
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    special = [content for content in (*_special_tokens(config).values(), *_extra_special_tokens(config)) if content]
    tokens = [AddedToken(**{"special": token["content"] in special, **token}) for _, token in listed]
    tokens += [AddedToken(content, special=True) for content in special]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for token in tokens:
        if token.content not in known:
            missing.setdefault(token.content, token)
    backend.add_tokens(list(missing.values()))


def read_chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name → template. Files of templates take precedence over tokenizer_config.json; the newest format is first."""
    files = {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    if (file := path / "chat_template.jinja").exists():
        files["default"] = file
    if files:
        return {name: read_bytes(file, _TEMPLATE).decode("utf-8") for name, file in files.items()}
    template = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        return template
    return {} if template is None else {"default": template}


def _clean_up_spaces(text: str) -> str:
    for mark in (".", "?", "!", ","):
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text
