"""The only declaration of the inputs that a forward reads.

Packing, padding, dummy steps, and the memory of recorded steps and CUDA graphs follow from it. For example, the only
line of AdaptedInputs gives layers one more number for each token. The host provides the values in
`FlatBatch.extra_inputs`, by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.attention.base import StepLayout
from quire.attention.by_head import HeadLayout
from quire.layers.step_media import StepMedia

Array = npt.NDArray[Any]


class StepSize(NamedTuple):
    """The key of recorded steps and CUDA graphs. tokens_per_request: 0 if it is not the same for all requests.
    adapted: whether some tokens have a low-rank adapter."""

    tokens: int
    requests: int
    tokens_per_request: int = 0
    adapted: bool = False


@dataclass(frozen=True)
class Declaration:
    """One input of a step. shape: names of dimensions. padding: the value, None to repeat the last value of the array.

    reader: which part of the forward reads the input. Recorded steps have copies of the inputs that layers read; the
    embedding and the attention prepare their own.
    """

    shape: tuple[str, ...]
    dtype: npt.DTypeLike
    padding: int | None
    reader: Literal["embedding", "attention", "layers"]

    def size(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dimensions[name] for name in self.shape)

    def blank(self, dimensions: Mapping[str, int]) -> Array:
        """An array that holds only padding."""
        return np.full(self.size(dimensions), self.padding or 0, self.dtype)

    def padded(self, array: Array, dimensions: Mapping[str, int]) -> Array:
        """The array, padded at the end of each dimension that is too short."""
        missing = [(0, want - have) for want, have in zip(self.size(dimensions), array.shape, strict=True)]
        if not any(behind for _, behind in missing):
            return array
        if self.padding is None:
            return np.pad(array, missing, mode="edge")
        return np.pad(array, missing, constant_values=self.padding)


def declared(*shape: str, dtype: npt.DTypeLike = np.int64, padding: int | None = 0, reader: str = "layers") -> Any:
    return field(metadata={"declaration": Declaration(shape, dtype, padding, reader)})  # type: ignore[arg-type]


def per_token(dtype: npt.DTypeLike = np.int64, padding: int = 0, reader: str = "layers") -> Any:
    return declared("tokens", dtype=dtype, padding=padding, reader=reader)


def per_request(dtype: npt.DTypeLike = np.int64, padding: int = 0, reader: str = "layers") -> Any:
    return declared("requests", dtype=dtype, padding=padding, reader=reader)


@dataclass(kw_only=True)
class StepInputs:
    """A step's inputs on the device. Padded tokens are not cached. Padded requests have no tokens.

    longest_prompt, shares, by_head, crossed: see StepLayout. host_positions: the positions that the host knows, see
    FlatBatch. media: of a step with pictures.
    """

    size: StepSize
    longest_prompt: int = 0
    shares: Sequence[int] = ()
    host_positions: Array | None = None
    by_head: HeadLayout | None = None
    media: StepMedia | None = None
    crossed: Tensor | None = None
    input_ids: Tensor = per_token(reader="embedding")
    positions: Tensor = per_token()
    slot_mapping: Tensor = declared("groups", "tokens", padding=-1, reader="attention")
    query_start_loc: Tensor = declared("bounds", dtype=np.int32, padding=None, reader="attention")
    seq_lens: Tensor = per_request(np.int32, reader="attention")
    block_tables: Tensor = declared("groups", "requests", "blocks", dtype=np.int32, reader="attention")

    @classmethod
    @cache
    def declarations(cls) -> dict[str, Declaration]:
        return {f.name: f.metadata["declaration"] for f in fields(cls) if "declaration" in f.metadata}

    @property
    def rotary_positions(self) -> Tensor:
        """[tokens], or [axes, tokens] in a model whose tokens have several; see RotaryEmbedding."""
        return self.positions

    def copy_for_layers(self, other: Self) -> None:
        """Overwrite the inputs that layers read with those of another step of the same size."""
        for name, declaration in self.declarations().items():
            if declaration.reader == "layers":
                getattr(self, name).copy_(getattr(other, name))

    def share(self, tokens: Tensor, shares: Sequence[int]) -> Self:
        """The inputs of some tokens for embedding and layers. Those of the attention are still the whole step's."""
        names = (name for name, declaration in self.declarations().items() if declaration.shape == ("tokens",))
        own: dict[str, Any] = {name: getattr(self, name).index_select(0, tokens) for name in names}
        return replace(self, size=self.size._replace(tokens=len(tokens)), shares=shares, **own)

    def layouts(self) -> list[StepLayout]:
        """The layout of each KV group."""
        tokens_per_request = self.size.tokens_per_request
        return [
            StepLayout(
                self.query_start_loc,
                self.seq_lens,
                slots,
                table,
                self.longest_prompt,
                tokens_per_request,
                self.shares,
                self.by_head,
                self.crossed,
            )
            for slots, table in zip(self.slot_mapping, self.block_tables, strict=True)
        ]


@dataclass(kw_only=True)
class AdaptedInputs(StepInputs):
    """The inputs of a model with low-rank adapters. adapters: the slot of each token's adapter, -1 for none."""

    adapters: Tensor = per_token(padding=-1)


@dataclass(kw_only=True)
class SectionedInputs(StepInputs):
    """The inputs of a model whose tokens have several rotary positions. rotary_offsets: how far these are from the
    token's position, which only the device may know."""

    rotary_offsets: Tensor = declared("axes", "tokens")

    @property
    def rotary_positions(self) -> Tensor:
        return self.positions + self.rotary_offsets


@dataclass(kw_only=True)
class AdaptedSectionedInputs(AdaptedInputs, SectionedInputs):
    pass


@dataclass(kw_only=True)
class CrossedInputs(StepInputs):
    """The inputs of a model with cross-attention."""

    crossed: Tensor = per_request(np.int32, padding=1, reader="attention")


def dimensions(size: StepSize, groups: int, blocks: int) -> dict[str, int]:
    """The length of each dimension that declarations name."""
    tokens = size.tokens
    requests = size.requests
    counts = {"tokens": tokens, "requests": requests, "bounds": requests + 1, "groups": groups, "blocks": blocks}
    return {**counts, "axes": 3}


def dummy_arrays(
    declarations: Mapping[str, Declaration], lengths: Mapping[str, int], counts: Array
) -> dict[str, Array]:
    """A dummy step whose request i has counts[i] tokens. None of its tokens is cached."""
    ends = counts.cumsum()
    arrays = {name: declaration.blank(lengths) for name, declaration in declarations.items()}
    arrays["positions"][:] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    arrays["query_start_loc"][1:] = ends
    arrays["seq_lens"][:] = counts
    return arrays
