"""Encodes texts to token ids: in this process, or in worker processes if the tokenizer may take quadratic time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from tokenizers import Tokenizer as Backend

from quire.messages.errors import error_text
from quire.platform.untrusted.limits import MIB, LimitExceededError, Limits
from quire.text.partial_backend import PartialBackend
from quire.text.token_bytes import is_fault
from quire.text.tokenizer_check import has_quadratic_step, vocabulary_size

SHORT_TEXT = 2_000  # characters, for which quadratic time means a few hundredths of a second
_LIMITS = Limits(cpu_seconds=5.0, memory_bytes=1024 * MIB, total_seconds=30.0, slice_seconds=0.5)


class TextEncoder:
    """Calls the library. prefix, suffix: tokens that the library does not add itself."""

    def __init__(self, backend: Backend | PartialBackend, prefix: list[int], suffix: list[int]) -> None:
        self.backend = backend
        self.prefix = prefix
        self.suffix = suffix

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See Tokenizer.encode."""
        with _encoding(text):
            # The batch method releases the interpreter's lock, even for one text. Without offsets it is faster.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return [*self.prefix, *encoding.ids, *self.suffix] if add_special_tokens else encoding.ids

    def encode_parts(
        self, first: str, second: str | None, keep: int | None, add_special_tokens: bool, from_left: bool
    ) -> tuple[list[int], list[int]]:
        """See Tokenizer.encode_parts."""
        with _encoding(first if second is None else first + second):
            texts = [first] if second is None else [first, second]
            return self._encode_parts(texts, keep, add_special_tokens, "left" if from_left else "right")

    def shortened(self, text: str, most: int) -> str:
        """See Tokenizer.shortened."""
        with _encoding(text):
            offsets = self.backend.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]

    def _encode_parts(
        self, texts: list[str], keep: int | None, add_special_tokens: bool, side: str
    ) -> tuple[list[int], list[int]]:
        parts = [self.backend.encode(text, add_special_tokens=False) for text in texts]
        is_pair = len(parts) > 1
        own = len(self.prefix) + len(self.suffix) if add_special_tokens else 0
        if keep is not None:
            added = self.backend.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
            lengths = [len(part) for part in parts]
            room = max(0, keep - own - added)
            if sum(lengths) > room:
                shorter = min(lengths[-1], lengths[0])
                longer = max(room - shorter, (room + 1) // 2) if is_pair else room
                for part, length in zip(parts, lengths, strict=True):
                    cut = longer if length > shorter or not is_pair else max(room - longer, 0)
                    if length > cut:
                        part.truncate(cut, direction=side)
        made = self.backend.post_process(parts[0], parts[1] if is_pair else None, add_special_tokens)
        if not own:
            return made.ids, made.type_ids
        ids = [*self.prefix, *made.ids, *self.suffix]
        return ids, [0] * len(self.prefix) + made.type_ids + made.type_ids[-1:] * len(self.suffix)

    def pieces(self, text: str, add_special_tokens: bool) -> list[str]:
        """See Tokenizer.pieces."""
        with _encoding(text):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).tokens


class ConfinedEncoder(TextEncoder):
    """Encodes longer texts in worker processes. Also raises ValueError for a text that takes too long, and BusyError if
    other texts use up the time."""

    def __init__(self, backend: Backend | PartialBackend, prefix: list[int], suffix: list[int]) -> None:
        from quire.platform.untrusted.service import Preparation

        super().__init__(backend, prefix, suffix)
        vocabulary_size(backend)  # the library would allocate memory for unused ids
        arguments = [backend.to_str(), prefix, suffix]
        key = f"texts {sha256(json.dumps(arguments).encode()).hexdigest()}"
        self._preparation = Preparation(key, f"{__name__}:prepare", lambda: arguments)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if _is_short(text):
            return super().encode(text, add_special_tokens)
        return list(self._run("encode", text, add_special_tokens))

    def encode_parts(
        self, first: str, second: str | None, keep: int | None, add_special_tokens: bool, from_left: bool
    ) -> tuple[list[int], list[int]]:
        if _is_short(first, second):
            return super().encode_parts(first, second, keep, add_special_tokens, from_left)
        ids, kinds = self._run("encode_parts", first, second, keep, add_special_tokens, from_left)
        return ids, kinds

    def shortened(self, text: str, most: int) -> str:
        return super().shortened(text, most) if _is_short(text) else str(self._run("shortened", text, most))

    def pieces(self, text: str, add_special_tokens: bool) -> list[str]:
        if _is_short(text):
            return super().pieces(text, add_special_tokens)
        return list(self._run("pieces", text, add_special_tokens))

    def _run(self, method: str, *arguments: Any) -> Any:
        from quire.platform.untrusted.pool import shared_pool

        try:
            return shared_pool().run(
                f"{__name__}:run", method, arguments, limits=_LIMITS, preparation=self._preparation
            )
        except LimitExceededError as error:
            raise ValueError(f"the prompt takes too long to tokenize: {error_text(error)}") from error


def text_encoder(backend: Backend | PartialBackend, prefix: list[int], suffix: list[int]) -> TextEncoder:
    """prefix, suffix: tokens that the backend does not add itself."""
    kind = ConfinedEncoder if has_quadratic_step(backend) else TextEncoder
    return kind(backend, prefix, suffix)


def _is_short(*texts: str | None) -> bool:
    """Whether texts may be encoded here. True also for values that are not valid text, since they fail at once."""
    if not all(text is None or isinstance(text, str) for text in texts):
        return True
    whole = "".join(filter(None, texts))
    if len(whole) <= SHORT_TEXT:
        return True
    try:
        whole.encode()
    except UnicodeEncodeError:
        return True
    return False


@contextmanager
def _encoding(text: object) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if is_fault(error):
            raise ValueError(_why_not_encoded(text, error)) from error
        raise


def _why_not_encoded(text: object, error: BaseException) -> str:
    if not isinstance(error, TypeError):
        return f"the tokenizer has no tokens for the text: {error_text(error)}"
    if not isinstance(text, str):
        return f"expected text, found {type(text).__name__}"
    place, surrogate = next((index, ord(char)) for index, char in enumerate(text) if 0xD800 <= ord(char) <= 0xDFFF)
    return f"the text is not valid Unicode: character {place} is U+{surrogate:04X}, half of a surrogate pair"


# ---- in the worker processes


def prepare(backend: str, prefix: list[int], suffix: list[int]) -> TextEncoder:
    return TextEncoder(Backend.from_str(backend), prefix, suffix)


def run(encoder: TextEncoder, method: str, arguments: list[Any]) -> Any:
    """Return the result of a method of the encoder."""
    return getattr(encoder, method)(*arguments)
