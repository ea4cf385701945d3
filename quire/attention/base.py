"""The interface of attention backends. A backend owns the layout of the cache and all code that accesses it."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.attention.by_head import HeadLayout

ENTRY_ALIGNMENT = 64  # bytes: a cache line, and more than any GPU's load needs


class Scores(TypedDict):
    """How scores are made of products of queries and keys, see AttentionBackend.attend."""

    scale: float
    window: NotRequired[int | None]
    soft_cap: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    bias: NotRequired[Tensor | None]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one model on one device. A backend is chosen and built for it.

    value_dim: None if a token has a key and a value of head_dim each. An integer means a latent cache (MLA in its
    absorbed form, arXiv:2405.04434): there is one KV head, only keys are stored, and the first value_dim elements of a
    key are its value. cell: torch.int8 or torch.float8_e4m3fn if the cache keeps cells of one byte (cells.py), None if
    it keeps elements of dtype. batch_invariant: whether the result of a token must depend on its own request alone, and
    not on how the step was put together. by_slot: a latent cache of which single tokens are read (sparse attention):
    the elements of a token lie together, and block tables list the slot of each key instead of blocks.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    value_dim: int | None = None
    cell: torch.dtype | None = None
    batch_invariant: bool = False
    by_slot: bool = False

    @property
    def out_dim(self) -> int:
        """The size of a head's result."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Preparation:
    """How queries and keys are prepared before attention: each head is normed, then rotated.

    q_weight, k_weight: of the RMS norms, None without norms. cos, sin: [tokens, rotary_dim / 2], float32, None without
    rotation.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


@dataclass(frozen=True)
class StepLayout:
    """One KV group's view of a step's flat batch: request r has the tokens query_start_loc[r] : query_start_loc[r + 1].

    Lengths count tokens; a token's slot is block_id * block_size + offset in the block.
    """

    query_start_loc: Tensor  # [requests + 1], int32
    seq_lens: Tensor  # [requests], int32: cached tokens and this step's tokens together
    slot_mapping: Tensor  # [tokens], int64, contiguous
    block_table: Tensor  # [requests, max_blocks], int32; entries past a request's last block are arbitrary
    longest_prompt: int = 0  # tokens of the longest request if no request has cached tokens, else 0
    tokens_per_request: int = 0  # of every request that has tokens; 0 if the numbers differ
    shares: Sequence[int] = ()  # of prefill context parallelism: how many of the tokens each rank computes
    by_head: "HeadLayout | None" = None  # of steps that have to do with compressed prompts
    crossed: Tensor | None = None  # [requests], int32: how many encoder tokens cross-attention reads


@dataclass
class Selection:
    """Which keys each token of a step may select, and the slots of those that it selects, in order of position.

    rows: [tokens], int32, indices of their requests in block_table, which lists blocks. seen: [tokens], int32, how
    many keys of its request a token sees. slots: [tokens, most], int32; if a token sees more keys than `most`, it
    selects so many, and else all of them, behind which the row is arbitrary. scores: [tokens, most], float32, if ranks
    have yet to choose among their selected keys. The scores of these are then written there, and `slots` gets the
    numbers of the keys instead, counted from the beginning of block_table. place: where kernels on a CPU find
    block_table: its address and its stride.
    """

    rows: Tensor
    seen: Tensor
    block_table: Tensor
    slots: Tensor
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        self.place = (ctypes.c_int64 * 2)()
        self._note_place()

    def _note_place(self) -> None:
        if self.block_table.device.type == "cpu":
            self.block_table = self.block_table.contiguous()
            self.place[:] = [self.block_table.data_ptr(), self.block_table.stride(0)]

    def change(self, rows: Tensor, seen: Tensor, block_table: Tensor) -> None:
        """Take the values of another step with equally many tokens. The addresses that recorded kernels read stay the
        same."""
        self.rows.copy_(rows)
        self.seen.copy_(seen)
        if block_table.device.type == "cpu":
            self.block_table = block_table
            self._note_place()
        else:
            self.block_table[:, : block_table.shape[1]].copy_(block_table)


class CacheBackend(ABC):
    """Owns the layout of what a kind of layers keeps in the cache.

    A block is one run of bytes that holds several entries, one for each layer of a KV group. A layer's cache is a view
    of its entry in all blocks: [blocks, *block_shape], elements of cache_dtype, with stride(0) from block to block.
    """

    name: str
    cache_dtype: torch.dtype
    block_shape: tuple[int, ...]
    capturable = False  # whether a CUDA graph that contains it is valid for all steps of the same size

    @property
    @abstractmethod
    def tokens_per_block(self) -> int:
        """The tokens that the ranks together keep in a block: by this number, StepLayout counts slots and the scheduler
        counts blocks."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """What besides the model's type says what the bytes of an entry mean."""

    def of_role(self, role: str) -> "CacheBackend":
        """The backend to which the entries of a role belong, see CacheEntry."""
        return self

    def entry_bytes(self, role: str = "kv") -> int:
        """Bytes of an entry, the part of one layer in one block, padded so that all entries are aligned."""
        if (owner := self.of_role(role)) is not self:
            return owner.entry_bytes()
        size = math.prod(self.block_shape) * self.cache_dtype.itemsize
        return -(-size // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT

    def view(self, memory: Tensor, entry_index: int) -> Tensor:
        """A layer's cache: an entry of all blocks of `memory`, which is uint8 [blocks, bytes of a block]. All entries
        have the same role."""
        return self.view_at(memory, entry_index * self.entry_bytes())

    def view_at(self, memory: Tensor, start: int) -> Tensor:
        """The same, of the entry that begins at byte `start` of each block."""
        size = math.prod(self.block_shape) * self.cache_dtype.itemsize
        return memory[:, start : start + size].view(self.cache_dtype).view(len(memory), *self.block_shape)

    @abstractmethod
    def plan(self, layout: StepLayout, previous: Any = None) -> Any:
        """What the layers need to know about a step. It is computed once, for all layers of the group.

        previous: the plan of another step with as many tokens and requests. It is overwritten and returned, so calls
        that were recorded with it can be replayed for this step.
        """


class AttentionBackend(CacheBackend):
    """Causal attention over a paged cache. One backend does everything, so its parts agree on the layout.

    Each layer's keys and values of a step are stored before any of its queries attends, so that requests of the
    same step may share blocks.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @classmethod
    @abstractmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        """Why this backend cannot serve the shape, or None if it can."""

    def of_role(self, role: str) -> "AttentionBackend":
        return self

    @property
    def tokens_per_block(self) -> int:
        return self.shape.block_size

    @property
    def layout(self) -> str:
        return f"{self.shape.cell or self.shape.dtype}"

    @abstractmethod
    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: Any) -> None:
        """Write k, v: [tokens, kv_heads, head_dim] into the slots of the plan. v is None if the cache is latent."""

    def read(self, cache: Tensor, blocks: Tensor, plane: int) -> Tensor:
        """The keys (plane 0) or the values (plane 1) in whole blocks: [blocks * block_size, kv_heads, head_dim]."""
        raise NotImplementedError(f"the {self.name} backend cannot read its cache")

    @abstractmethod
    def attend(self, q: Tensor, cache: Tensor, plan: Any, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        """q: [tokens, heads, head_dim] -> out: [tokens, heads, out_dim], lse: [tokens, heads] in float32.

        A query at position p sees the keys at positions max(0, p - window + 1) ... p. A scaled score s becomes
        soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118). sinks: [heads], float32; one more logit in the
        softmax of each head, without a value (gpt-oss; arXiv:2309.17453). bias: [heads, 2 * reach + 1], float32,
        contiguous; it is added to the scores of a head, by the distance (position of the key) - p, from -reach to
        reach; keys that are farther away have the bias of that end (T5, arXiv:1910.10683). lse is the natural logarithm
        of the sum of the exponentiated scores, including the sink's. It allows merging partial results over disjoint
        keys, of which at most one may include the sinks.
        """

    def select(self, q: Tensor, weights: Tensor, cache: Tensor, selection: Selection) -> None:
        """Select the keys with the highest scores for each token: fill selection.slots. Of keys with equal scores, the
        first are selected. DeepSeek-V3.2's lightning indexer (arXiv:2512.02556, equation 1):

            score of a key = sum over heads of weight * max(0, q . key)

        cache: of the indexer's keys, latents whose value_dim is their head_dim. q: [tokens, heads, head_dim]; weights:
        [tokens, heads], of q's type.
        """
        raise NotImplementedError(f"the {self.name} backend has no indexer")


class PreparingBackend(AttentionBackend):
    """A backend that can norm, rotate and store in one pass over a step's queries, keys and values.

    kernels: the implementation of norms and rotation with which this pass agrees bit by bit.
    """

    kernels: str

    @abstractmethod
    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: Any, prep: Preparation) -> None:
        """Norm and rotate q, k: [tokens, heads, head_dim] in place, then store k, v."""
