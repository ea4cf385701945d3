"""Lightning attention (arXiv:2401.04658): linear attention whose state decays by a constant factor of each head."""

import math

import torch
from torch import Tensor

from quire.layers.alibi import alibi_slopes
from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear
from quire.layers.norm import make_norm
from quire.layers.qk_norm import RMSNormOfAllHeads
from quire.layers.recurrent import Recurrent, by_head
from quire.layers.specs import OutputPart
from quire.layers.state_spec import LightningSpec


class Lightning(Recurrent):
    """names: the names of state_qkv, state_z, gate_norm and state_out, and of state_q_norm and state_k_norm."""

    def __init__(self, builder: Builder, spec: LightningSpec, names: dict[str, str], place: LayerPlace) -> None:
        super().__init__(builder, spec, names, place)
        self.spec = spec
        total = spec.num_heads * spec.value_dim
        dim = spec.key_dim
        outputs = [OutputPart(names["state_qkv"], 3 * total, *self.of_heads(dim, at)) for at in (0, total, 2 * total)]
        self.qkv = ColumnParallelLinear(builder, spec.hidden_size, outputs, spec.bias)
        gates = OutputPart(names["state_z"], total, *self.of_heads(spec.value_dim))
        self.gate = ColumnParallelLinear(builder, spec.hidden_size, [gates])
        self.q_norm, self.k_norm = (
            make_norm(builder, names[key] if spec.qk_norm else None, dim, spec.norm)
            for key in ("state_q_norm", "state_k_norm")
        )
        slopes = alibi_slopes(spec.num_heads)[self.share.heads.start : self.share.heads.stop]
        decays = [math.exp(-slope * spec.decay_rate) for slope in slopes]
        self.decays = torch.tensor(decays, dtype=torch.float32, device=builder.device)
        self.of_all: RMSNormOfAllHeads | None = None
        self.norm_weight: Tensor | None = None
        size = total // spec.norm_groups
        if any(bound * spec.value_dim % size for bound in (self.share.heads.start, self.share.heads.stop)):
            if spec.norm_groups > 1:
                raise ValueError(
                    f"tensor_parallel_size={builder.tensor_group.size} must divide the {spec.norm_groups} groups of "
                    "heads that are normed together; lower it"
                )
            heads = self.share.heads
            weight = 0.0 if self.share.is_copy else 1.0
            self.of_all = RMSNormOfAllHeads(
                builder, names["gate_norm"], spec.norm, spec.value_dim, spec.num_heads, heads, weight
            )
        else:
            self.norm_weight = builder.parameter(self.values)
            builder.part(
                f"{names['gate_norm']}.weight", self.norm_weight, (total,), slice(*self.of_heads(spec.value_dim))
            )
        self.norm_size = size

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand."""
        assert self.pages is not None, "bind the cache first"
        assert self.place.rotary is not None
        kernels = self.kernels
        heads = self.num_heads
        dim = self.key_dim
        q, k, v = torch.split(self.qkv(x, state.slots), self.values, 1)
        if self.spec.silu:
            q, k, v = (kernels.activate(part.contiguous(), "silu") for part in (q, k, v))
        q, k = kernels.rotary_embedding(
            self.q_norm(by_head(q, heads, dim)), self.k_norm(by_head(k, heads, dim)), *state.rotary[self.place.rotary]
        )
        decays = self.decays.expand(len(x), -1).contiguous()
        steps = torch.full_like(decays, dim**-0.5)  # the factor of scores
        plan = state.plans[self.place.state_group]
        y = kernels.scan(q, k, by_head(v, heads, dim), decays, steps, None, self.pages, plan, "plain")
        y = pick(y.flatten(1), wanted)
        gate = self.gate(pick(x, wanted), state.slots_of(wanted))
        if self.of_all is not None:
            y = self.of_all(by_head(y, heads, dim)).flatten(1)
        y = kernels.gated_norm(y, gate, self.norm_weight, self.spec.norm.eps, self.norm_size, False, "sigmoid")
        return self.out(y, state.slots_of(wanted))
