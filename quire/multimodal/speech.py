"""Speech transcripts: builds a model's prompts, and reads the timestamps in its output."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array
from quire.text.tokenizer import Tokenizer

QUIET = 10  # long audio is cut within the last 1 / QUIET of the model's window
WINDOWS = 10  # per second: a cut is made in the quietest one


@dataclass(frozen=True)
class Piece:
    """A part of the audio that the model processes at once. start: seconds from the beginning of the audio."""

    start: float
    samples: Array


@dataclass(frozen=True)
class Segment:
    """A part of a transcript. start, end: in seconds. first, last: its tokens are tokens[first:last]."""

    start: float
    end: float
    first: int
    last: int


class Speech:
    """Whisper's prompts and timestamps (arXiv:2212.04356, section 2.3)."""

    def __init__(
        self, tokenizer: Tokenizer, settings: Mapping[str, Any], sample_rate: int, most_samples: int, positions: int
    ) -> None:
        """settings: of generation_config.json. most_samples: the length of the model's window. positions: of the
        window, each with a timestamp."""
        self.sample_rate = sample_rate
        self._most_samples = most_samples
        self._tokenizer = tokenizer
        self._tick = most_samples / sample_rate / positions
        self._start, self._previous = self._token("startoftranscript"), self._token("startofprev")
        self._no_times = self._token("notimestamps")
        self._tasks = {task: self._token(task) for task in ("transcribe", "translate")}
        self.no_speech = self._token("nospeech", "nocaptions")
        self.languages: dict[str, int] = {}  # token ids by code
        if settings.get("is_multilingual", True):
            for token_id in range(self._start + 1, self._tasks["translate"]):
                if code := re.fullmatch(r"<\|(\w+)\|>", tokenizer.id_to_token(token_id) or ""):
                    self.languages[code[1]] = token_id

    def _token(self, *names: str) -> int:
        found = (self._tokenizer.token_to_id(f"<|{name}|>") for name in names)
        return next((token_id for token_id in found if token_id is not None), -1)

    def pieces(self, samples: Array) -> list[Piece]:
        """Split audio where it is quiet, so that few words are cut."""
        return list(self._pieces(samples))

    def _pieces(self, samples: Array) -> Iterator[Piece]:
        start = 0
        most = self._most_samples
        window = self.sample_rate // WINDOWS
        while len(samples) - start > most:
            searched = samples[start + most - most // QUIET : start + most]
            searched = searched[: len(searched) // window * window].reshape(-1, window)
            quietest = int(np.square(searched).sum(1).argmin())
            end = start + most - most // QUIET + quietest * window + window // 2
            yield Piece(start / self.sample_rate, samples[start:end])
            start = end
        yield Piece(start / self.sample_rate, samples[start:])

    def beginning(self, text: str | None, room: int) -> list[int]:
        """Return the prompt up to where the model generates the language. text: the previous text, of which the last
        `room` tokens are used.

        Raises MediaError for a text with special tokens.
        """
        if not text:
            return [self._start]
        tokens = self._tokenizer.encode(" " + text.strip(), False)
        if max(tokens, default=0) >= self._start - 1:  # <|endoftext|> is before <|startoftranscript|>
            raise MediaError("prompt: it must not have special tokens")
        return [self._previous, *tokens[-room:], self._start]

    def prompt(self, beginning: Sequence[int], task: str, language: int | None, with_times: bool) -> list[int]:
        """task: "transcribe" or "translate". language: a token id; None for an English-only model."""
        spoken = [] if language is None else [language, self._tasks[task]]
        if with_times and language is None:
            return list(beginning)
        return [*beginning, *spoken, *([] if with_times else [self._no_times])]

    def segments(self, token_ids: Sequence[int], seconds: float) -> list[Segment]:
        """Split an output into segments at its timestamps. seconds: the length of the piece."""
        found = list[Segment]()
        first = 0
        start = 0.0
        for place, token_id in enumerate([*token_ids, -1]):
            is_time = token_id > self._no_times
            if not is_time and place < len(token_ids):
                continue
            end = (token_id - self._no_times - 1) * self._tick if is_time else max(seconds, start)
            if self.text(token_ids[first:place]).strip():
                found.append(Segment(start, end, first, place))
            first = place + 1
            start = end
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without timestamps and special tokens."""
        return self._tokenizer.decode([token_id for token_id in token_ids if token_id <= self._no_times])
