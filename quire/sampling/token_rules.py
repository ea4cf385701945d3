"""Built-in logits processors for options of SamplingParams. They forbid tokens or change their logits."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces

_NEVER = float("-inf")


@dataclass(frozen=True)
class _Lines:
    """The concatenated table lines of some places, on the device. A line concerns one token id at one place."""

    index: Tensor  # [places]: index of each place's logits
    place: Tensor  # [lines]: each line's place
    cells: tuple[Tensor, Tensor]  # index and token id of each line: its cell in the logits
    rows: Tensor  # [lines]: the batch row of each line's place
    columns: list[Tensor]  # the tables' further columns, [lines, ...] each


class _TableRule(LogitsProcessor):
    """Stores a table for each row that uses the rule. A table is a list of columns; the first one has token ids.

    The tables of a step's places are concatenated. The result stays on the device until the rows of the places change.
    """

    needs_host_tokens = False

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._tables: dict[int, tuple[npt.NDArray[Any], ...]] = {}
        self._joined: tuple[bytes, _Lines] | None = None
        # A Python number would be copied to the GPU each time, and the host would wait for the copy.
        self._never, self._zero = torch.full((), _NEVER, device=device), torch.zeros((), device=device)

    def keep(self, row: int, *columns: npt.NDArray[Any]) -> bool:
        """Store the row's table, unless it is empty. Returns whether it was stored."""
        if not len(columns[0]):
            return False
        self._tables[row], self._joined = columns, None
        return True

    def lines(self, logits: Tensor, at: SamplingPlaces) -> _Lines:
        """Return the concatenated lines of the places `at`. Lines whose token id has no logit are left out, since a
        stop token may be outside the model's vocabulary."""
        key = at.rows.tobytes() + at.index.tobytes()
        if self._joined is None or self._joined[0] != key:
            tables = [self._tables[row] for row in at.rows.tolist()]
            place = np.repeat(np.arange(len(tables)), [len(table[0]) for table in tables])
            joined = [np.concatenate(column) for column in zip(*tables, strict=True)]
            inside = (joined[0] >= 0) & (joined[0] < logits.shape[1])
            place = place[inside]
            token_ids, *columns = (self.upload(column[inside]) for column in joined)
            cells = self.upload(at.index[place]), token_ids
            per_line = self.upload(place), cells, self.upload(at.rows[place])
            self._joined = key, _Lines(self.upload(at.index), *per_line, columns)
        return self._joined[1]

    def forbid(self, logits: Tensor, lines: _Lines, where: Tensor) -> None:
        """Forbid the tokens of the lines where `where` is true. Several lines may share a cell."""
        logits.index_put_(lines.cells, torch.where(where, self._never, self._zero), accumulate=True)


class AllowedTokenIds(_TableRule):
    """SamplingParams.allowed_token_ids: forbids all other tokens."""

    def add(self, row: int, request: NewRequest) -> bool:
        return self.keep(row, np.asarray(request.sampling.allowed_token_ids or (), np.int64))

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        lines = self.lines(logits, at)
        allowed = logits[lines.cells]
        logits.index_fill_(0, lines.index, _NEVER)
        logits[lines.cells] = allowed


class BadWords(_TableRule):
    """SamplingParams.bad_words: forbids the last token of a sequence while the output ends in its other tokens.

    With the bad word [5, 6, 7], token 7 is forbidden after an output that ends in 5, 6.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._longest = 0  # the longest sequence, without its last token

    def add(self, row: int, request: NewRequest) -> bool:
        if not request.bad_words:
            return False
        extra = max(0, max(map(len, request.bad_words)) - 1 - self._longest)
        if extra:
            self._longest += extra
            for other, (last, start, before) in self._tables.items():
                self._tables[other] = last, start, np.pad(before, ((0, 0), (extra, 0)), constant_values=-1)
        before = np.full((len(request.bad_words), self._longest), -1)  # padded on the left with -1
        for line, token_ids in zip(before, request.bad_words, strict=True):
            line[self._longest - len(token_ids) + 1 :] = token_ids[:-1]
        last = np.asarray([token_ids[-1] for token_ids in request.bad_words])
        return self.keep(row, last, np.full((len(last), 1), request.num_prompt_tokens), before)

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        lines = self.lines(logits, at)
        output_start, before = lines.columns
        position = torch.arange(-self._longest, 0, device=self.device) + at.lengths[lines.place][:, None]
        same = at.state.token_ids[lines.rows[:, None], position.clamp(min=0)] == before
        self.forbid(logits, lines, ((same & (position >= output_start)) | (before < 0)).all(1))


class MinTokens(_TableRule):
    """SamplingParams.min_tokens: forbids stop tokens until the output has that many tokens."""

    def add(self, row: int, request: NewRequest) -> bool:
        count = request.sampling.min_tokens
        stops = np.asarray(request.stop_token_ids if count else [], np.int64)
        return self.keep(row, stops, np.full(len(stops), request.num_prompt_tokens + count))

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        lines = self.lines(logits, at)
        [first_end] = lines.columns  # the minimum length of prompt and output
        self.forbid(logits, lines, at.lengths[lines.place] < first_end)


class LogitBias(_TableRule):
    """SamplingParams.logit_bias: adds to the logits of some tokens."""

    def add(self, row: int, request: NewRequest) -> bool:
        bias = request.sampling.logit_bias or {}
        return self.keep(row, np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32))

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        lines = self.lines(logits, at)
        logits[lines.cells] += lines.columns[0]


class RequestFunctions(LogitsProcessor):
    """SamplingParams.logits_processors: functions of a place's token ids and logits, called place by place."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._functions: dict[int, list[tuple[Callable[..., Tensor], bool]]] = {}  # bool: whether it takes the prompt

    def add(self, row: int, request: NewRequest) -> bool:
        functions = request.sampling.logits_processors or []
        self._functions[row] = [(f, len(inspect.signature(f).parameters) == 3) for f in functions]
        return bool(functions)

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        for place, (index, row) in enumerate(zip(at.index.tolist(), at.rows.tolist(), strict=True)):
            prompt, output = at.token_ids(place)
            for function, takes_prompt in self._functions[row]:
                arguments = (prompt, output) if takes_prompt else (output,)
                logits[index] = function(*arguments, logits[index])
