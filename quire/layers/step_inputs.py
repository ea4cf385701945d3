"""The single declaration of the inputs of a forward pass.

Packing, padding, dummy steps, and the memory of recorded steps and CUDA graphs follow from it. For example, a single
line passes the slot of each token's adapter to the layers. The host provides the values in `FlatBatch.extra_inputs`, by
name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The key of recorded steps and CUDA graphs. tokens_per_request: 0 if it is not the same for all requests. adapted:
    whether any token has a low-rank adapter."""

    tokens: int
    requests: int
    tokens_per_request: int = 0
    adapted: bool = False


@dataclass(frozen=True)
class Declaration:
    """One input of a step. shape: names of dimensions. padding: the value, None to repeat the last value of the array.

    reader: the part of the forward pass that reads the input. Recorded steps have copies of the inputs that layers
    read; the embedding and the attention prepare their own inputs. optional: whether only some models have it.
    """

    shape: tuple[str, ...]
    dtype: npt.DTypeLike
    padding: int | None
    reader: Literal["embedding", "attention", "layers"]
    optional: bool = False

    def size(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(dimensions[name] for name in self.shape)

    def blank(self, dimensions: Mapping[str, int]) -> Array:
        """Return an array that contains only padding."""
        return np.full(self.size(dimensions), self.padding or 0, self.dtype)

    def padded(self, array: Array, dimensions: Mapping[str, int]) -> Array:
        """Return the array, padded at the end of each dimension that is too short."""
        missing = [(0, want - have) for want, have in zip(self.size(dimensions), array.shape, strict=True)]
        if not any(behind for _, behind in missing):
            return array
        if self.padding is None:
            return np.pad(array, missing, mode="edge")
        return np.pad(array, missing, constant_values=self.padding)


def declared(*shape: str, dtype: npt.DTypeLike = np.int64, padding: int | None = 0, reader: str = "layers") -> Any:
    return field(metadata={"declaration": Declaration(shape, dtype, padding, reader)})  # type: ignore[arg-type]


def optional(*shape: str, dtype: npt.DTypeLike = np.int64, padding: int | None = 0, reader: str = "layers") -> Any:
    """Declare an input that is None in models without it."""
    declaration = Declaration(shape, dtype, padding, reader, optional=True)  # type: ignore[arg-type]
    return field(default=None, metadata={"declaration": declaration})


def per_token(dtype: npt.DTypeLike = np.int64, padding: int = 0, reader: str = "layers") -> Any:
    return declared("tokens", dtype=dtype, padding=padding, reader=reader)


def per_request(dtype: npt.DTypeLike = np.int64, padding: int = 0, reader: str = "layers") -> Any:
    return declared("requests", dtype=dtype, padding=padding, reader=reader)


@dataclass(kw_only=True)
class StepInputs:
    """A step's inputs on the device. Padded tokens are not cached. Padded requests have no tokens.

    longest_prompt, shares, by_head, crossed: see StepLayout. host_positions: the positions that are known on the host,
    see FlatBatch. media: the embeddings of a step with pictures. adapters: the slot of each token's low-rank adapter,
    -1 for none. rotary_offsets: for tokens with several rotary positions, the offsets of these from the token's
    position, which may be known only on the device.
    """

    size: StepSize
    longest_prompt: int = 0
    shares: Sequence[int] = ()
    host_positions: Array | None = None
    by_head: HeadLayout | None = None
    media: StepMedia | None = None
    input_ids: Tensor = per_token(reader="embedding")
    positions: Tensor = per_token()
    slot_mapping: Tensor = declared("groups", "tokens", padding=-1, reader="attention")
    query_start_loc: Tensor = declared("bounds", dtype=np.int32, padding=None, reader="attention")
    seq_lens: Tensor = per_request(np.int32, reader="attention")
    block_tables: Tensor = declared("groups", "requests", "blocks", dtype=np.int32, reader="attention")
    adapters: Tensor | None = optional("tokens", padding=-1)
    rotary_offsets: Tensor | None = optional("axes", "tokens")
    crossed: Tensor | None = optional("requests", dtype=np.int32, padding=1, reader="attention")

    @classmethod
    @cache
    def declarations(cls, *options: str) -> dict[str, Declaration]:
        """Return the inputs that all models have, and the optional inputs with these names."""
        every = {f.name: f.metadata["declaration"] for f in fields(cls) if "declaration" in f.metadata}
        return {name: declared for name, declared in every.items() if not declared.optional or name in options}

    @property
    def slots(self) -> Tensor | None:
        """`adapters`, or None if no token has an adapter."""
        return self.adapters if self.size.adapted else None

    @property
    def rotary_positions(self) -> Tensor:
        """[tokens], or [axes, tokens] if a token has several positions; see RotaryEmbedding."""
        return self.positions if self.rotary_offsets is None else self.positions + self.rotary_offsets

    def copy_for_layers(self, other: Self) -> None:
        """Overwrite the inputs that layers read with those of another step of the same size."""
        for name, _, tensor in self._read_by("layers"):
            tensor.copy_(getattr(other, name))

    def share(self, tokens: Tensor, shares: Sequence[int]) -> Self:
        """Return the step with some tokens' inputs for embedding and layers. Attention still gets those of the whole
        step."""
        own = self.of_tokens(lambda tensor, axis: tensor.index_select(axis, tokens), "embedding", "layers")
        return replace(self, size=self.size._replace(tokens=len(tokens)), shares=shares, **own)

    def of_tokens(self, pick: Callable[[Tensor, int], Tensor], *readers: str) -> dict[str, Any]:
        """Return the inputs of some tokens, by name. pick: selects these tokens from a tensor along an axis."""
        return {
            name: pick(tensor, declaration.shape.index("tokens"))
            for name, declaration, tensor in self._read_by(*readers)
            if "tokens" in declaration.shape
        }

    def _read_by(self, *readers: str) -> Iterator[tuple[str, Declaration, Tensor]]:
        """Iterate over this step's inputs that these parts of the forward pass read."""
        for name, declaration in _read_by(*readers):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, declaration, tensor

    def layouts(self) -> list[StepLayout]:
        """Return the layout of each KV group."""
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


@cache
def _read_by(*readers: str) -> list[tuple[str, Declaration]]:
    every = {f.name: f.metadata["declaration"] for f in fields(StepInputs) if "declaration" in f.metadata}
    return [(name, declaration) for name, declaration in every.items() if declaration.reader in readers]


def dimensions(size: StepSize, groups: int, blocks: int) -> dict[str, int]:
    """Return the length of each dimension that declarations name."""
    tokens = size.tokens
    requests = size.requests
    counts = {"tokens": tokens, "requests": requests, "bounds": requests + 1, "groups": groups, "blocks": blocks}
    return {**counts, "axes": 3}


def dummy_arrays(
    declarations: Mapping[str, Declaration], lengths: Mapping[str, int], counts: Array
) -> dict[str, Array]:
    """Return a dummy step whose request i has counts[i] tokens. None of its tokens is cached."""
    ends = counts.cumsum()
    arrays = {name: declaration.blank(lengths) for name, declaration in declarations.items()}
    arrays["positions"][:] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    arrays["query_start_loc"][1:] = ends
    arrays["seq_lens"][:] = counts
    return arrays
