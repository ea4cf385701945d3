"""The interface of logits processors, which change the logits of a whole step before tokens are sampled. Built-in
processors and plugins use it alike.

    class Hurry(LogitsProcessor):
        '''extra_args={"hurry": 0.5}: each token of output adds 0.5 to the logit of end-of-sequence.'''

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

vLLM's plugins differ in two points. They are notified of moved rows, but Quire's rows never move. They get one row of
logits per row of the batch, but a step of Quire samples at places: some rows have none, others have several.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.declaration import imported
from quire.config.engine import ConfigError, EngineConfig
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest
from quire.ops.memory import upload
from quire.sampling.batch_state import BatchState

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplingPlaces:
    """Places at which tokens are about to be sampled. Place i comes after the first lengths[i] tokens of row rows[i] of
    the batch, and its logits are logits[index[i]]. A row may have several places, one after the other.

    On an asynchronous device, the tokens before a place may exist only on the device. `state` and `lengths` are exact
    there, and reading them on the host would wait. num_tokens and all_token_ids are on the host. They are exact for a
    processor with needs_host_tokens; for others, num_tokens is an upper bound of `lengths`.
    """

    index: Ints  # [places]
    rows: Ints  # [places]
    num_prompt: Ints  # [places]
    num_tokens: Ints  # [places]: tokens of prompt and output before the place
    all_token_ids: npt.NDArray[np.int32]  # [all rows, longest]; for a place, ignore the tokens after its position
    state: BatchState  # of all rows, on the device
    lengths: Tensor  # [places], int64, on the device

    @cached_property
    def num_output(self) -> Ints:
        return self.num_tokens - self.num_prompt

    def token_ids(self, place: int) -> tuple[list[int], list[int]]:
        """Return the token ids of the prompt, and those of the output before one place."""
        known = self.all_token_ids[self.rows[place], : self.num_tokens[place]].tolist()
        return known[: self.num_prompt[place]], known[self.num_prompt[place] :]

    def where(self, mask: npt.NDArray[np.bool_]) -> "SamplingPlaces":
        if mask.all():
            return self
        chosen = upload(mask.nonzero()[0], self.lengths.device)
        columns = self.index[mask], self.rows[mask], self.num_prompt[mask], self.num_tokens[mask]
        return SamplingPlaces(*columns, self.all_token_ids, self.state, self.lengths[chosen])


class LogitsProcessor:
    """Changes logits for the requests that use it. Each process with a part of the model creates one instance.

    needs_host_tokens: whether `apply` reads tokens or lengths on the host. If so, each step with a request that uses
    the processor waits for an asynchronous device. False promises that `apply` reads only `state` and `lengths`.
    """

    needs_host_tokens: ClassVar[bool] = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.device = device

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Copy the array to the device. Unlike `Tensor.to`, this does not wait for the GPU's work."""
        return upload(array, self.device)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError for invalid parameters, before the request is queued."""

    def add(self, row: int, request: NewRequest) -> bool:
        """Register a new request in row `row` (< max_num_seqs), which replaces the row's earlier request. Returns
        whether the request uses this processor.

        A preempted request is added again. Its token_ids are then its prompt followed by its output so far.
        """
        raise NotImplementedError

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        """Change `logits` [all places, vocab], float32, in place, at the places `at`. There is at least one place, and
        all places belong to requests that use this processor."""
        raise NotImplementedError


MakeProcessor = Callable[[EngineConfig, torch.device], LogitsProcessor]


class LogitsProcessors:
    """All logits processors, in order. A step whose rows use none costs one table lookup."""

    def __init__(self, processors: Sequence[LogitsProcessor], max_rows: int) -> None:
        self.processors = processors
        self._host_readers = [i for i, processor in enumerate(processors) if processor.needs_host_tokens]
        self._asks = np.zeros((len(processors), max_rows), np.bool_)

    def add(self, row: int, request: NewRequest) -> None:
        self._asks[:, row] = [processor.add(row, request) for processor in self.processors]

    def ask(self, rows: Ints) -> bool:
        """Whether any of the rows uses a processor."""
        return bool(self._asks.any() and self._asks[:, rows].any())  # first the common case: no request uses one

    def need_host_tokens(self, rows: Ints) -> bool:
        """Whether any of the rows uses a processor with needs_host_tokens."""
        return bool(self._asks[self._host_readers][:, rows].any())

    def apply(self, logits: Tensor, at: SamplingPlaces) -> Tensor:
        """Apply the processors. Returns `logits` itself, unchanged or changed in place, or a changed float32 copy."""
        asks = self._asks[:, at.rows]
        if asks.any():
            logits = logits.float()
            for processor, mask in zip(self.processors, asks, strict=True):
                if mask.any():
                    processor.apply(logits, at.where(mask))
        return logits


def load_plugins(plugins: Iterable[str | type]) -> list[type[LogitsProcessor]]:
    """Return the classes of the plugins, which are given as classes or as "package.module:Class". Raises ConfigError
    for one that cannot be imported or is not a LogitsProcessor."""
    return [_load(plugin) for plugin in plugins]


def _load(plugin: str | type) -> type[LogitsProcessor]:
    found = imported("logits_processors", plugin) if isinstance(plugin, str) else plugin
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits_processors: {plugin!r} is not a subclass of {__name__}.LogitsProcessor")
    return found
