"""Further forms in which pooling models of support.pooling_families are published."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from support.pooling_families import (
    DECODER,
    HIDDEN,
    ROBERTA,
    SIZES,
    PoolingFamily,
    Reference,
    Tensors,
    drawn,
    edit,
    embeds,
    jina_v3,
    jina_v5,
    saved,
    scores,
    states_of,
)


class NomicExperts(torch.nn.Module):
    """The feed-forward layers of nomic-embed-text-v2-moe: plain ones and, in every second layer, experts."""

    def __init__(self, experts: int, size: int) -> None:
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(drawn(max(1, experts), size, HIDDEN, seed=n)) for n in (5, 6))
        self.inner_bias = torch.nn.Parameter(drawn(size, seed=7))
        self.bias = torch.nn.Parameter(drawn(HIDDEN, seed=8))
        self.router = torch.nn.Parameter(4 * drawn(experts, HIDDEN, seed=9)) if experts else None

    def forward(self, x: Tensor) -> Tensor:
        gelu = torch.nn.functional.gelu
        if self.router is None:
            return gelu(x @ self.w1[0].T + self.inner_bias) @ self.w2[0] + self.bias
        weights, chosen = (x @ self.router.T).softmax(-1).topk(2, -1)
        every = torch.stack([gelu(x @ w1.T) @ w2 for w1, w2 in zip(self.w1, self.w2, strict=True)], -2)
        picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, HIDDEN))
        return (picked * weights[..., None]).sum(-2) + self.bias

    def tensors(self, root: str) -> Tensors:
        if self.router is None:
            return {
                f"{root}.fc1.weight": self.w1[0],
                f"{root}.fc1.bias": self.inner_bias,
                f"{root}.fc2.weight": self.w2[0].T,
                f"{root}.fc2.bias": self.bias,
            }
        experts = {f"{root}.experts.mlp.w{n}": w.reshape(-1, HIDDEN) for n, w in ((1, self.w1), (2, self.w2))}
        return {**experts, f"{root}.experts.bias": self.bias, f"{root}.router.layer.weight": self.router}


def nomic_moe(folder: Path) -> Reference:
    """nomic-embed-text-v2-moe: transformers has the attention of the first version."""
    model = saved(folder, "NomicBert", SIZES)
    mine: Tensors = {}
    for i, layer in enumerate(model.layers):
        layer.mlp = NomicExperts(4 if i % 2 else 0, 96)
        mine |= {name: tensor.detach() for name, tensor in layer.mlp.tensors(f"encoder.layers.{i}.mlp").items()}
        parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
        for n, part in enumerate(parts):
            part.bias = torch.nn.Parameter(drawn(HIDDEN, seed=20 + n))
        biases = [part.bias.detach() for part in parts]
        mine[f"encoder.layers.{i}.attn.Wqkv.bias"] = torch.cat(biases[:3])
        mine[f"encoder.layers.{i}.attn.out_proj.bias"] = biases[3]
    edit(
        folder,
        lambda tensors: {**{name: tensor for name, tensor in tensors.items() if ".mlp." not in name}, **mine},
        activation_function="gelu",
        n_inner=96,
        num_experts=4,
        moe_top_k=2,
        moe_every_n_layers=2,
        qkv_proj_bias=True,
        mlp_fc1_bias=True,
    )
    states = states_of(model)
    return lambda ids: states(ids)[0]


FORMS: dict[str, PoolingFamily] = {
    "jina-embeddings-v3": PoolingFamily(jina_v3),
    "jina-embeddings-v5-nano": PoolingFamily(jina_v5("EuroBert", is_decoder=False)),
    "nomic-embed-text-v2-moe": PoolingFamily(nomic_moe),
    "EuroBertModel": PoolingFamily(embeds("EuroBert", DECODER)),
    "JinaEmbeddingsV3Model": PoolingFamily(embeds("JinaEmbeddingsV3", ROBERTA)),
    "EuroBertForSequenceClassification": PoolingFamily(
        scores("EuroBert", DECODER, "ForSequenceClassification", num_labels=2, classifier_pooling="mean")
    ),
    "EuroBertForTokenClassification": PoolingFamily(
        scores("EuroBert", DECODER, "ForTokenClassification", num_labels=2)
    ),
    "JinaEmbeddingsV3ForSequenceClassification": PoolingFamily(
        scores("JinaEmbeddingsV3", ROBERTA, "ForSequenceClassification", num_labels=1)
    ),
    "gte-Qwen2": PoolingFamily(embeds("Qwen2", {**DECODER, "is_causal": False})),
}
