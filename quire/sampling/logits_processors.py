"""The interface of whatever changes logits before tokens are drawn, for all of a step at once; built-ins and plugins
alike.

    class Hurry(LogitsProcessor):
        '''extra_args={"hurry": 0.5}: with each token of output, end-of-sequence gains so much.'''

        def __init__(self, config: EngineConfig, device: torch.device) -> None:
            super().__init__(config, device)
            self.hurry = np.zeros(config.scheduler.max_num_seqs)

        def add(self, row: int, request: NewRequest) -> bool:
            self.hurry[row] = (request.sampling.extra_args or {}).get("hurry", 0.0)
            return self.hurry[row] != 0.0

        def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
            gain = self.hurry[at.rows] * at.num_output
            logits[self.upload(at.index), 2] += self.upload(gain).to(logits)

    LLM(logits_processors=["my_package.hurry:Hurry"])

vLLM's plugins differ in two points: they are told of rows that move, which never happens here, and they get the logits
of the whole batch, whereas a step here samples at some places: not in every row, and in some rows after each of several
tokens.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config import ConfigError, EngineConfig
from quire.messages.errors import error_text
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest
from quire.ops.memory import upload
from quire.sampling.batch_state import BatchState

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingPlaces:
    """Places where a token is about to be drawn: after the first lengths[i] tokens of row rows[i] of the batch, from
    logits[index[i]]. A row may have several places, one after the other.

    What tokens come before a place may be known to the device alone, which works late: `state` and `lengths` are right
    there, and reading them on the host would wait. num_tokens and all_token_ids are the host's. They are right for a
    processor that needs_host_tokens; for others, num_tokens is an upper bound of `lengths`.
    """

    index: Ints  # [places]
    rows: Ints  # [places]
    num_prompt: Ints  # [places]
    num_tokens: Ints  # [places]: prompt and output before the place
    all_token_ids: npt.NDArray[np.int32]  # [all rows, longest]; a row's tokens behind a place have no meaning there
    state: BatchState  # of all rows, on the device
    lengths: Tensor  # [places], int64, on the device

    @cached_property
    def num_output(self) -> Ints:
        return self.num_tokens - self.num_prompt

    def token_ids(self, place: int) -> tuple[list[int], list[int]]:
        """Prompt and output before one place."""
        known = self.all_token_ids[self.rows[place], : self.num_tokens[place]].tolist()
        return known[: self.num_prompt[place]], known[self.num_prompt[place] :]

    def where(self, mask: npt.NDArray[np.bool_]) -> "SamplingPlaces":
        if mask.all():
            return self
        chosen = upload(mask.nonzero()[0], self.lengths.device)
        columns = self.index[mask], self.rows[mask], self.num_prompt[mask], self.num_tokens[mask]
        return SamplingPlaces(*columns, self.all_token_ids, self.state, self.lengths[chosen])


class LogitsProcessor:
    """Changes logits of the requests that ask for it. Made once for each process that holds a part of the model.

    needs_host_tokens: whether `apply` looks at tokens or lengths on the host. A device that works late is then waited
    for in each step of a request that asks. False promises that `apply` reads nothing but `state` and `lengths`.
    """

    needs_host_tokens: ClassVar[bool] = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.device = device

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device. Unlike `Tensor.to`, it does not wait for what a GPU is doing."""
        return upload(array, self.device)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError for parameters that are wrong, before the request is queued."""

    def add(self, row: int, request: NewRequest) -> bool:
        """Row `row` (< max_num_seqs) got a request; what it held before is over. True if the row asks for anything.

        A request that was preempted comes again, with its output behind its prompt in token_ids.
        """
        raise NotImplementedError

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        """Change `logits` [all places, vocab], float32, in place, at the places `at`: at least one, and all of them of
        requests that asked."""
        raise NotImplementedError


class LogitsProcessors:
    """Several, in their order. A step whose rows ask for nothing costs one look into a table."""

    def __init__(self, processors: Sequence[LogitsProcessor], max_rows: int) -> None:
        self.processors = processors
        self._host_readers = [i for i, processor in enumerate(processors) if processor.needs_host_tokens]
        self._asks = np.zeros((len(processors), max_rows), np.bool_)

    def add(self, row: int, request: NewRequest) -> None:
        self._asks[:, row] = [processor.add(row, request) for processor in self.processors]

    def ask(self, rows: Ints) -> bool:
        """Whether any of the rows asks for anything."""
        return bool(self._asks.any() and self._asks[:, rows].any())  # hardly ever does any

    def need_host_tokens(self, rows: Ints) -> bool:
        """Whether any of the rows asks a processor that looks at its tokens on the host."""
        return bool(self._asks[self._host_readers][:, rows].any())

    def apply(self, logits: Tensor, at: SamplingPlaces) -> Tensor:
        """The logits as they were, or changed in place, or changed in float32."""
        asks = self._asks[:, at.rows]
        if asks.any():
            logits = logits.float()
            for processor, mask in zip(self.processors, asks, strict=True):
                if mask.any():
                    processor.apply(logits, at.where(mask))
        return logits


def load_plugins(plugins: Iterable[str | type]) -> list[type[LogitsProcessor]]:
    """The classes that "package.module:Class" names, or that are given as such. Raises ConfigError."""
    return [_load(plugin) for plugin in plugins]


def _load(plugin: str | type) -> type[LogitsProcessor]:
    found: object = plugin
    if isinstance(plugin, str):
        module, _, name = plugin.partition(":")
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"logits_processors: cannot import {plugin!r} (package.module:Class): {error_text(error)}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits_processors: {plugin!r} is not a subclass of {__name__}.LogitsProcessor")
    return found
