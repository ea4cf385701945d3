"""Attention and a recurrent layer side by side (Falcon-H1, arXiv:2507.22448)."""

from torch import Tensor

from quire.attention.base import AttentionBackend, CacheBackend
from quire.attention.states import StateBackend
from quire.layers.attention import Attention
from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.mamba2 import Mamba2
from quire.layers.state_spec import HybridSpec


class Hybrid:
    """The sum of the results of both layers, which read the same input. names: the tensor names of both."""

    def __init__(self, builder: Builder, spec: HybridSpec, names: dict[str, str], place: LayerPlace) -> None:
        self.spec = spec
        self.kernels = builder.kernels
        self.attention = Attention(builder, spec.attention, names, place)
        self.recurrent = Mamba2(builder, spec.recurrent, names, place)

    def bind(self, backend: CacheBackend, cache: Tensor) -> None:
        if isinstance(backend, StateBackend):
            self.recurrent.bind(backend, cache)
        elif isinstance(backend, AttentionBackend):
            self.attention.bind(backend, cache)

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        (a_in, a_out), (r_in, r_out) = self.spec.attention_multipliers, self.spec.recurrent_multipliers
        scaled = self.kernels.multiply
        attended = scaled(self.attention(scaled(x, a_in), state, wanted), a_out)
        recurred = scaled(self.recurrent(scaled(x, r_in), state, wanted), r_out)
        total: Tensor = self.kernels.add(attended, recurred, attended)
        return total
