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
    """Options that turn query-key products into scores, see AttentionBackend.attend."""

    scale: float
    window: NotRequired[int | None]
    soft_cap: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    bias: NotRequired[Tensor | None]


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one model on one device, for which a backend is chosen and built.

    value_dim: None if a token has a key and a value of head_dim each. An integer means a latent cache (MLA in its
    absorbed form, arXiv:2405.04434): there is one KV head, only keys are stored, and the first value_dim elements of a
    key are its value. cell: torch.int8 or torch.float8_e4m3fn if the cache stores cells of one byte (cells.py),
    torch.float16 if it stores float16 for a dtype of float32, None if it stores elements of dtype. batch_invariant:
    whether a token's result must depend only on its own request, not on the composition of the step. by_slot: single
    tokens of a latent cache are read (sparse attention): a token's elements are contiguous, and block tables list the
    slot of each key instead of blocks.
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

    q_weight, k_weight: the weights of the RMS norms, None without norms. cos, sin: [tokens, rotary_dim / 2], float32,
    None without rotation.
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
    seq_lens: Tensor  # [requests], int32: cached tokens plus this step's tokens
    slot_mapping: Tensor  # [tokens], int64, contiguous
    block_table: Tensor  # [requests, max_blocks], int32; entries past a request's last block are arbitrary
    longest_prompt: int = 0  # length of the longest request if no request has cached tokens, else 0
    tokens_per_request: int = 0  # equal for all requests that have tokens; 0 if the numbers differ
    shares: Sequence[int] = ()  # number of tokens that each rank computes (prefill context parallelism)
    by_head: "HeadLayout | None" = None  # set in steps with compressed prompts
    crossed: Tensor | None = None  # [requests], int32: number of encoder tokens that cross-attention reads


@dataclass
class Selection:
    """The keys that each token of a step may select, and the slots of the selected keys, in order of position.

    rows: [tokens], int32, the row of each token's request in block_table, which lists blocks. seen: [tokens], int32,
    the number of keys that a token sees. slots: [tokens, most], int32; a token that sees more than `most` keys selects
    `most` of them, any other token selects all, and the rest of its row is arbitrary. scores: [tokens, most], float32,
    only if ranks still have to choose among their selected keys: it receives the scores of these keys, and `slots`
    receives the indices of the keys from the beginning of block_table instead of slots. place: the address and the
    stride of block_table, for CPU kernels.
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
        """Copy in the values of another step with the same number of tokens. The addresses that recorded kernels read
        do not change."""
        self.rows.copy_(rows)
        self.seen.copy_(seen)
        if block_table.device.type == "cpu":
            self.block_table = block_table
            self._note_place()
        else:
            self.block_table[:, : block_table.shape[1]].copy_(block_table)


class CacheBackend(ABC):
    """Owns the layout of the cache entries of one kind of layer.

    A block consists of bytes, with one entry for each layer of a KV group. A layer's cache is a view of its entry in
    all blocks: [blocks, *block_shape], elements of cache_dtype, with stride(0) from block to block.
    """

    name: str
    cache_dtype: torch.dtype
    block_shape: tuple[int, ...]
    capturable = False  # whether a CUDA graph of it is valid for all steps of the same size

    @property
    @abstractmethod
    def tokens_per_block(self) -> int:
        """The number of tokens in a block, over all ranks. Slots in StepLayout and blocks in the scheduler are based on
        it."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """A description of the format of an entry; together with the model's type, it defines the meaning of its
        bytes."""

    def of_role(self, role: str) -> "CacheBackend":
        """Return the backend to which the entries of a role belong, see CacheEntry."""
        return self

    def entry_bytes(self, role: str = "kv") -> int:
        """Return the size of an entry (one layer's part of a block) in bytes, padded so that all entries are
        aligned."""
        if (owner := self.of_role(role)) is not self:
            return owner.entry_bytes()
        size = math.prod(self.block_shape) * self.cache_dtype.itemsize
        return -(-size // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT

    def view(self, memory: Tensor, entry_index: int) -> Tensor:
        """Return a layer's cache: one entry of all blocks of `memory`, see `view_at`. All entries have the same
        role."""
        return self.view_at(memory, entry_index * self.entry_bytes())

    def view_at(self, memory: Tensor, start: int) -> Tensor:
        """Like `view`, for the entry that begins at byte `start` of each block. memory: uint8 [blocks, bytes of a
        block], or [blocks, parts, bytes of a part] if the parts of a block are not adjacent (see KVMemory)."""
        size = math.prod(self.block_shape) * self.cache_dtype.itemsize
        if memory.dim() == 3:
            part, start = divmod(start, memory.shape[2])
            memory = memory[:, part]
        return memory[:, start : start + size].view(self.cache_dtype).view(len(memory), *self.block_shape)

    @abstractmethod
    def plan(self, layout: StepLayout, previous: Any = None) -> Any:
        """Compute the data about a step that all layers of the group share.

        previous: the plan of another step with the same numbers of tokens and requests. It is overwritten and returned,
        so recorded calls that use it can be replayed for this step.
        """


class AttentionBackend(CacheBackend):
    """Causal attention over a paged cache. One backend stores, reads and attends, so all of these share its layout.

    A layer stores all keys and values of a step before any of its queries attends, so requests of the same step may
    share blocks.
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
        """Return the keys (plane 0) or the values (plane 1) of whole blocks: [blocks * block_size, kv_heads,
        head_dim]."""
        raise NotImplementedError(f"the {self.name} backend cannot read its cache")

    @abstractmethod
    def attend(self, q: Tensor, cache: Tensor, plan: Any, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        """q: [tokens, heads, head_dim] -> out: [tokens, heads, out_dim], lse: [tokens, heads] in float32.

        A query at position p sees the keys at positions max(0, p - window + 1) ... p. A scaled score s becomes
        soft_cap * tanh(s / soft_cap) (Gemma 2, arXiv:2408.00118). sinks: [heads], float32; an additional logit in the
        softmax of each head, without a value (gpt-oss; arXiv:2309.17453). bias: [heads, 2 * reach + 1], float32,
        contiguous; added to a head's scores by the distance (position of the key) - p, from -reach to reach; keys that
        are farther away use the bias at the nearer end (T5, arXiv:1910.10683). lse is the natural logarithm of the sum
        of the exponentiated scores, including the sink's. With it, partial results over disjoint sets of keys can be
        merged; at most one of them may include the sinks.
        """

    def select(self, q: Tensor, weights: Tensor, cache: Tensor, selection: Selection) -> None:
        """Select the keys with the highest scores for each token: fill selection.slots. Ties are resolved in favour of
        earlier keys. DeepSeek-V3.2's lightning indexer (arXiv:2512.02556, equation 1):

            score of a key = sum over heads of weight * max(0, q . key)

        cache: the indexer's keys, latents whose value_dim equals their head_dim. q: [tokens, heads, head_dim]; weights:
        [tokens, heads], of q's type.
        """
        raise NotImplementedError(f"the {self.name} backend has no indexer")


class PreparingBackend(AttentionBackend):
    """A backend that can norm, rotate and store in one pass over a step's queries, keys and values.

    kernels: the implementation of norms and rotation whose results this pass reproduces bit for bit.
    """

    kernels: str

    @abstractmethod
    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: Any, prep: Preparation) -> None:
        """Norm and rotate q, k: [tokens, heads, head_dim] in place, then store k, v."""
