"""Recurrent layers as data. StateShape has their sizes on a rank; ops/reference/states.py defines their
computations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.kv.specs import CacheEntry, StateShape, StateSpec
from quire.layers.attention_spec import AttentionSpec, HeadShare
from quire.layers.specs import MLPSpec, NormSpec

if TYPE_CHECKING:
    from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class RecurrentSpec:
    """The common fields of recurrent layers. num_kv_heads: the number of key heads; each serves the same number of
    heads."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: NormSpec

    @property
    def decays(self) -> int:
        return 1

    def cache_shape(self, group: "Communicator") -> StateShape:
        share = HeadShare.of(self, group)
        heads = len(share.heads)
        key_heads = len(share.kv_heads)
        channels = 2 * key_heads * self.key_dim + heads * self.value_dim
        return StateShape(heads, key_heads, self.key_dim, self.value_dim, channels, self.conv_width, self.decays)

    def kv_spec(self, layer: int, window: int | None) -> StateSpec:
        return StateSpec((CacheEntry(layer, "state"),))


@dataclass(frozen=True)
class Mamba2Spec(RecurrentSpec):
    """A state-space layer (Mamba-2, arXiv:2405.21060), whose groups are the heads of its keys B and queries C.

    time_step: the shortest and the longest. has_norm: whether the gated result is normed, separately for each group.
    multipliers: the factors of the projected z, x, B, C and dt (Falcon-H1), None for none.
    """

    conv_bias: bool = True
    bias: bool = False
    time_step: tuple[float, float] = (0.0, float("inf"))
    has_norm: bool = True
    gate_first: bool = True
    multipliers: tuple[float, ...] | None = None


@dataclass(frozen=True)
class MambaSpec(RecurrentSpec):
    """A state-space layer of Mamba-1 (arXiv:2312.00752). Its heads are its channels (value_dim is 1), and all channels
    share B and C. norm: the norm of the input of time steps, B and C, for families that name these norms. rank: the
    rank of the product that computes time steps."""

    rank: int
    conv_bias: bool = True
    bias: bool = False

    def cache_shape(self, group: "Communicator") -> StateShape:
        """Return one matrix with a column for each channel of the rank. Each of its elements decays separately."""
        channels = len(HeadShare.of(self, group).heads)
        return StateShape(1, 1, self.key_dim, channels, channels, self.conv_width, decays=0, scales=channels)


@dataclass(frozen=True)
class DeltaSpec(RecurrentSpec):
    """A layer with the gated delta rule.

    projections: how the checkpoint stores q, k, v, the gate z, the decay a and the step b: in two tensors ordered by
    key head ("by_key_head", Qwen3-Next), in four, or six if q, k and v have separate names ("separate", Qwen3.5 and
    OLMo Hybrid), or as in Kimi Delta Attention ("kimi"), where each element of a key has its own decay, and two small
    layers each compute decay and gate, or in six tensors with such decays ("kimi_whole", Ling 3). step_scale: the
    factor of steps; with 2, a state can change its sign (OLMo Hybrid, arXiv:2411.12537). decay_bound: the least
    logarithm of a decay, None for no bound; see ops/reference/states.py (Ling 3).
    """

    projections: Literal["by_key_head", "separate", "kimi", "kimi_whole"] = "separate"
    step_scale: float = 1.0
    decay_bound: float | None = None

    @property
    def decays(self) -> int:
        return self.key_dim if self.projections.startswith("kimi") else 1


@dataclass(frozen=True)
class RwkvSpec(RecurrentSpec):
    """A layer of RWKV-7 (arXiv:2503.14456), whose keys and values are as wide as the stream. Its state includes the
    last input of the MLP. norm: the norm of each head's results. The other fields are the ranks of its small products;
    value_rank is 0 in the first layer, whose values all other layers read."""

    decay_rank: int
    rate_rank: int
    gate_rank: int
    value_rank: int

    def cache_shape(self, group: "Communicator") -> StateShape:
        heads = len(HeadShare.of(self, group).heads)
        dim = self.key_dim
        hidden = self.hidden_size
        return StateShape(heads, heads, dim, dim, hidden, self.conv_width, dim, 2 * dim, mlp_channels=hidden)


@dataclass(frozen=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution (LFM2). Its heads are its channels. It has no state but the convolution's inputs. bias:
    whether the convolution and both projections have biases."""

    bias: bool = False

    def cache_shape(self, group: "Communicator") -> StateShape:
        return StateShape(0, 0, 1, 1, len(HeadShare.of(self, group).heads), self.conv_width)


@dataclass(frozen=True)
class LightningSpec(RecurrentSpec):
    """Lightning attention (Ling 2.5). decay_rate: the slopes of ALiBi are multiplied by it to get the negative
    logarithms of the heads' decays. norm_groups: the result is normed separately for so many groups of heads. qk_norm:
    whether queries and keys are normed. silu: whether queries, keys and values go through SiLU. bias: of their
    projection."""

    decay_rate: float = 1.0
    norm_groups: int = 1
    qk_norm: bool = False
    silu: bool = False
    bias: bool = False

    def cache_shape(self, group: "Communicator") -> StateShape:
        heads = len(HeadShare.of(self, group).heads)
        return StateShape(heads, heads, self.key_dim, self.value_dim, 0, 1)


@dataclass(frozen=True)
class HybridSpec:
    """Attention and a recurrent layer, which read the same input and whose results are added up (Falcon-H1).

    multipliers: the factors of the input and the result of each of the two.
    """

    attention: AttentionSpec
    recurrent: Mamba2Spec
    attention_multipliers: tuple[float, float] = (1.0, 1.0)
    recurrent_multipliers: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class SharedBlockSpec:
    """A block of attention and an MLP that several layers share, before a layer's own recurrent layer (Zamba2, see
    layers/shared_block.py). attention_rank, mlp_rank: of a layer's own low-rank products; 0 for none."""

    attention: AttentionSpec
    mlp: MLPSpec
    recurrent: Mamba2Spec
    attention_rank: int
    mlp_rank: int
