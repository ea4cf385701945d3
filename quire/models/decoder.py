"""The one decoder: assembled from the layers by a spec."""

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.kvcache.specs import KVCacheSpec, group_layers
from quire.layers.attention import Attention, ForwardState
from quire.layers.build import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.spec import DecoderSpec


class GatedMLP:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, builder: Builder, names: dict[str, str], hidden: int, intermediate: int, bias: bool) -> None:
        start, stop = builder.tensor_group.share(intermediate)
        parts = [OutputPart(names[key], intermediate, start, stop) for key in ("gate", "up")]
        self.gate_up = ColumnParallelLinear(builder, hidden, parts, bias)
        self.down = RowParallelLinear(builder, names["down"], intermediate, hidden, bias)
        self.silu_and_mul = builder.kernels.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.silu_and_mul(self.gate_up(x)))


class DecoderLayer:
    """norm, attention, norm, MLP around a residual stream."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, window: int | None, kv_group: int) -> None:
        names = {key: name.format(i=index) for key, name in spec.names.items()}
        self.attention_norm = RMSNorm(builder, names["attention_norm"], spec.hidden_size, spec.norm_eps)
        self.attention = Attention(builder, spec.attention, names, window, kv_group)
        self.mlp_norm = RMSNorm(builder, names["mlp_norm"], spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(builder, names, spec.hidden_size, spec.intermediate_size, spec.mlp_bias)

    def __call__(self, x: Tensor, residual: Tensor | None, state: ForwardState) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, state)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class Decoder:
    """A decoder-only language model over a paged KV cache."""

    def __init__(self, builder: Builder, spec: DecoderSpec, max_model_len: int) -> None:
        self.spec, self.kernels = spec, builder.kernels
        windows = [w if w is not None and w < max_model_len else None for w in spec.windows]
        self.kv_specs: list[KVCacheSpec] = group_layers(windows)
        group_of = {layer: g for g, kv_spec in enumerate(self.kv_specs) for layer in kv_spec.layers}
        self.embedding = VocabParallelEmbedding(builder, spec.names["embedding"], spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer(builder, spec, i, windows[i], group_of[i]) for i in range(spec.num_layers)]
        self.final_norm = RMSNorm(builder, spec.names["final_norm"], spec.hidden_size, spec.norm_eps)
        tied = self.embedding if spec.tie_embeddings else None
        self.lm_head = LMHead(builder, spec.names["lm_head"], spec.vocab_size, spec.hidden_size, tied)
        self.rotary = RotaryEmbedding(spec.rotary, max_model_len, builder.device)

    def bind_cache(self, backend: AttentionBackend, tensors: list[Tensor]) -> None:
        """Give each group's j-th layer cache tensor j."""
        for kv_spec in self.kv_specs:
            for j, layer in enumerate(kv_spec.layers):
                self.layers[layer].attention.bind(backend, tensors[j])

    def forward(self, ids: Tensor, state: ForwardState) -> Tensor:
        """ids: [tokens] -> hidden states after the final norm: [tokens, hidden]"""
        x, residual = self.embedding(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, state)
        return self.final_norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab]"""
        return self.lm_head(hidden)
