"""Logits processors that come with SamplingParams: which tokens may be drawn now, and what their logits get."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import Ints, LogitsProcessor, SamplingPlaces

_NEVER = float("-inf")


class _TableRule(LogitsProcessor):
    """Keeps a table for each row that has one, as columns. Those of a step's rows are joined, and stay joined as long
    as the rows stay the same."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._tables: dict[int, tuple[npt.NDArray[Any], ...]] = {}
        self._joined: tuple[bytes, Ints, list[npt.NDArray[Any]]] | None = None
        self._never = torch.full((), _NEVER, device=device)  # a number would be sent to a GPU each time, and waited for

    def keep(self, row: int, *columns: npt.NDArray[Any]) -> bool:
        """Give the row a table, if it has any line. Whether it has."""
        if not len(columns[0]):
            return False
        self._tables[row], self._joined = columns, None
        return True

    def join(self, at: SamplingPlaces) -> tuple[Ints, list[npt.NDArray[Any]]]:
        """(place in `at` of each line, columns)"""
        key = at.rows.tobytes()
        if self._joined is None or self._joined[0] != key:
            tables = [self._tables[row] for row in at.rows.tolist()]
            place = np.repeat(np.arange(len(tables)), [len(table[0]) for table in tables])
            self._joined = key, place, [np.concatenate(column) for column in zip(*tables, strict=True)]
        return self._joined[1:]

    def cells(self, at: SamplingPlaces) -> tuple[Tensor, Tensor, list[npt.NDArray[Any]]]:
        """Where in the logits the token ids of the first column are; and the other columns."""
        place, (token_ids, *others) = self.join(at)
        return self.upload(at.index[place]), self.upload(token_ids), others


class AllowedTokenIds(_TableRule):
    """No token but these."""

    def add(self, row: int, request: NewRequest) -> bool:
        return self.keep(row, np.asarray(request.sampling.allowed_token_ids or (), np.int64))

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        *cells, _ = self.cells(at)
        allowed = logits[*cells]
        logits.index_fill_(0, self.upload(at.index), _NEVER)
        logits[*cells] = allowed


class BadWords(_TableRule):
    """Not the last token of a sequence whose beginning is the end of the output."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._longest = 0  # tokens before the last one, of any sequence

    def add(self, row: int, request: NewRequest) -> bool:
        if not request.bad_words:
            return False
        more = max(0, max(map(len, request.bad_words)) - 1 - self._longest)
        if more:
            self._longest += more
            for other, (last, before) in self._tables.items():
                self._tables[other] = last, np.pad(before, ((0, 0), (more, 0)), constant_values=-1)
        before = np.full((len(request.bad_words), self._longest), -1)  # filled up on the left
        for line, token_ids in zip(before, request.bad_words, strict=True):
            line[self._longest - len(token_ids) + 1 :] = token_ids[:-1]
        return self.keep(row, np.asarray([token_ids[-1] for token_ids in request.bad_words]), before)

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        place, (last, before) = self.join(at)
        where = at.num_tokens[place, None] - self._longest + np.arange(self._longest)  # [sequences, longest]
        same = at.all_token_ids[at.rows[place, None], where] == before
        complete = ((same & (where >= at.num_prompt[place, None])) | (before < 0)).all(1)
        logits[self.upload(at.index[place[complete]]), self.upload(last[complete])] = self._never


class MinTokens(_TableRule):
    """Nothing that would end the request before it has so many tokens."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._min_tokens = np.zeros(config.scheduler.max_num_seqs, np.int64)

    def add(self, row: int, request: NewRequest) -> bool:
        self._min_tokens[row] = request.sampling.min_tokens
        stops = np.asarray(request.stop_token_ids, np.int64)
        return self.keep(row, stops) and request.sampling.min_tokens > 0

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        short = at.num_output < self._min_tokens[at.rows]
        if short.any():
            at = at.where(short)
            place, (token_ids,) = self.join(at)
            inside = (token_ids >= 0) & (token_ids < logits.shape[1])  # a stop token need not be one of the model's
            logits[self.upload(at.index[place[inside]]), self.upload(token_ids[inside])] = self._never


class LogitBias(_TableRule):
    """Adds to logits."""

    def add(self, row: int, request: NewRequest) -> bool:
        bias = request.sampling.logit_bias or {}
        return self.keep(row, np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32))

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        rows, token_ids, (bias,) = self.cells(at)
        logits[rows, token_ids] += self.upload(bias)


class RequestFunctions(LogitsProcessor):
    """SamplingParams.logits_processors: functions of one row's token ids and logits, called row by row."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._functions: dict[int, list[tuple[Callable[..., Tensor], bool]]] = {}  # and whether each takes the prompt

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
