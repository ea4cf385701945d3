"""Families that transformers lacks, made of the families that it has: with other names of fields, and changed parts.

`hub` functions of support/stand_in_layouts.py give their tensors the published names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP


def stand_in(
    kind: str,
    architecture: str,
    config: type[Any],
    model: type[Any],
    change: Callable[[Any], None] = lambda network: None,
    **fields: str,
) -> None:
    """Register a family of transformers under another name. change: replaces parts of a new model. fields: the names in
    its config.json of the fields of `config`."""
    names = {**config.attribute_map, **fields}
    config_class = type(f"{architecture}Config", (config,), {"model_type": kind, "attribute_map": names})

    def init(self: Any, settings: Any) -> None:
        model.__init__(self, settings)
        change(self)

    model_class = type(architecture, (model,), {"config_class": config_class, "__init__": init})
    AutoConfig.register(kind, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def with_layer_norms(network: Any) -> None:
    size = network.config.hidden_size
    eps = network.config.rms_norm_eps
    network.model.norm = nn.LayerNorm(size, eps=eps)
    for layer in network.model.layers:
        layer.input_layernorm = nn.LayerNorm(size, eps=eps)
        layer.post_attention_layernorm = nn.LayerNorm(size, eps=eps)


def with_biases_of_outputs(network: Any) -> None:
    """Only the output projections of both branches have biases."""
    for layer in network.model.layers:
        for part, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            old = getattr(part, name)
            setattr(part, name, nn.Linear(old.in_features, old.out_features))


def with_multipliers(network: Any) -> None:
    """The factors of embeddings and logits in the muP parametrization."""
    config = network.config
    network.model.embed_tokens.register_forward_hook(lambda module, given, out: out * config.input_mult)
    factor = config.output_mult / config.mup_scale_factor
    network.lm_head.register_forward_hook(lambda module, given, out: out * factor)


class Mixture(nn.Module):
    """Small experts, of which each token uses a few, and an expert that every token uses."""

    def __init__(self, config: Any, shared: int) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.normalizes = config.norm_topk_prob
        count = getattr(config, "n_routed_experts", None) or config.num_experts
        self.gate = nn.Linear(config.hidden_size, count, bias=False)
        self.experts = nn.ModuleList(_mlp(config, config.moe_intermediate_size) for _ in range(count))
        self.shared_experts = _mlp(config, shared * config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.topk(self.top_k, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        routed = torch.stack([expert(x) for expert in self.experts], -1) @ weights[..., None]
        return routed[..., 0] + self.shared_experts(x)


def _mlp(config: Any, size: int) -> nn.Module:
    own = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=size,
        mlp_bias=config.mlp_bias,
    )
    return LlamaMLP(own)


class NormedHead(nn.Linear):
    """Its columns have length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, functional.normalize(self.weight, dim=0, eps=1e-7))


def with_mixtures(network: Any) -> None:
    config = network.config
    if getattr(config, "norm_head", False):
        network.lm_head = NormedHead(config.hidden_size, config.vocab_size, bias=False)
    for i, layer in enumerate(network.model.layers):
        if i >= config.first_k_dense_replace and i % getattr(config, "moe_layer_freq", 1) == 0:
            layer.mlp = Mixture(config, getattr(config, "n_shared_experts", None) or config.num_shared_experts)


def with_skips(network: Any) -> None:
    """Before some layers, the stream is blended with that before an earlier layer."""
    config = network.config
    weight = config.bskcn_tv[1]
    saved: dict[int, Tensor] = {}

    def before(index: int, x: Tensor) -> tuple[Tensor]:
        for start in (1, 2):
            if index in getattr(config, f"bskcn_{start}"):
                saved[start] = x
        for start, end in ((1, 3), (2, 4)):
            if index in getattr(config, f"bskcn_{end}"):
                x = saved[start] * weight + x * (1 - weight)
        return (x,)

    for i, layer in enumerate(network.model.layers):
        layer.register_forward_pre_hook(lambda module, given, i=i: before(i, given[0]))


class DeciLayer(nn.Module):
    """A layer of Llama which may lack one or both of its branches."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        block = config.block_configs[index]
        self.self_attn = self.mlp = None
        own = LlamaConfig(**{**config.to_dict(), "head_dim": config.head_dim, "intermediate_size": 1})
        own._attn_implementation = "eager"
        if not block["attention"]["no_op"]:
            own.num_key_value_heads = config.num_attention_heads // block["attention"]["n_heads_in_group"]
            self.self_attn = LlamaAttention(own, index)
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not block["ffn"]["no_op"]:
            own.intermediate_size = block["ffn"]["intermediate_size"]
            self.mlp = LlamaMLP(own)
            self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        if self.self_attn is not None:
            x = x + self.self_attn(self.input_layernorm(x), **given)[0]
        return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))


def with_other_layers(network: Any) -> None:
    config = network.config
    network.model.layers = nn.ModuleList(DeciLayer(config, i) for i in range(config.num_hidden_layers))


def with_unscaled_embeddings(network: Any) -> None:
    network.model.embed_tokens = nn.Embedding(network.config.vocab_size, network.config.hidden_size)
    network.tie_weights()


def _after_norms(layer: Any, x: Tensor, **given: Any) -> Tensor:
    """DeepSeek's layer with two more norms, under the names that openPangu gives them."""
    x = x + layer.post_attention_layernorm(layer.self_attn(layer.input_layernorm(x), **given)[0])
    return x + layer.post_mlp_layernorm(layer.mlp(layer.pre_mlp_layernorm(x)))


def with_pangus_norms(network: Any) -> None:
    config = network.config
    for layer in network.model.layers:
        layer.pre_mlp_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer.post_mlp_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layer.forward = MethodType(_after_norms, layer)
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = config.rms_norm_eps


class DomynLayer(nn.Module):
    """A layer of Qwen3 with two more norms. The norm of queries has no weight. Some layers have no positions."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.attention = Qwen3Attention(config, index)
        self.attention.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps, elementwise_affine=False)
        self.feedforward = Qwen3MLP(config)
        self.rotates = config.position_layers[index] == "rope"
        for name in ("pre_attention", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_norm", nn.RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor, position_embeddings: Any, **given: Any) -> Tensor:
        cos, sin = position_embeddings
        angles = (cos, sin) if self.rotates else (torch.ones_like(cos), torch.zeros_like(sin))
        attended = self.attention(self.pre_attention_norm(x), position_embeddings=angles, **given)[0]
        x = x + self.post_attention_norm(attended)
        return x + self.post_feedforward_norm(self.feedforward(self.pre_feedforward_norm(x)))


def with_domyns_layers(network: Any) -> None:
    config = network.config
    network.model.layers = nn.ModuleList(DomynLayer(config, i) for i in range(config.num_hidden_layers))


class StepQueries(nn.Module):
    """Queries as a product with a norm inside."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank = config.share_q_dim
        self.q_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.inter_norm = nn.RMSNorm(rank, config.rms_norm_eps)
        self.wq = nn.Linear(rank, config.num_attention_heads * config.head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wq(self.inter_norm(self.q_proj(x)))


def with_steps_layers(network: Any) -> None:
    config = network.config
    for i, layer in enumerate(network.model.layers):
        layer.self_attn.q_proj = StepQueries(config)
        if str(i) in config.moe_layers_enum.split(","):
            layer.mlp = Mixture(config, 1)


stand_in("orion", "OrionForCausalLM", LlamaConfig, LlamaForCausalLM, with_layer_norms)
stand_in("telechat3", "TeleChat3ForCausalLM", LlamaConfig, LlamaForCausalLM)
stand_in(
    "telechat",
    "TeleChat2ForCausalLM",
    LlamaConfig,
    LlamaForCausalLM,
    with_biases_of_outputs,
    num_hidden_layers="n_layer",
    num_attention_heads="n_head",
    intermediate_size="ffn_hidden_size",
    rms_norm_eps="layer_norm_epsilon",
    max_position_embeddings="seq_length",
)
stand_in("teleflm", "TeleFLMForCausalLM", LlamaConfig, LlamaForCausalLM, with_multipliers)
stand_in("pangu_embedded", "PanguEmbeddedForCausalLM", LlamaConfig, LlamaForCausalLM, attention_bias="bias")
stand_in("deepseek", "DeepseekForCausalLM", LlamaConfig, LlamaForCausalLM, with_mixtures)
stand_in("bailing_moe", "BailingMoeForCausalLM", LlamaConfig, LlamaForCausalLM, with_mixtures)
stand_in(
    "bailing_moe_v2",
    "BailingMoeV2ForCausalLM",
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    n_routed_experts="num_experts",
    num_local_experts="num_experts",
    n_shared_experts="num_shared_experts",
    attention_bias="use_qkv_bias",
)
stand_in(
    "param2moe",
    "Param2MoEForCausalLM",
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    n_routed_experts="num_experts",
    num_local_experts="num_experts",
    n_shared_experts="num_shared_experts",
    attention_bias="use_qkv_bias",
)
stand_in(
    "chatglm",
    "ChatGLMModel",
    GlmConfig,
    GlmForCausalLM,
    num_hidden_layers="num_layers",
    vocab_size="padded_vocab_size",
    intermediate_size="ffn_hidden_size",
    num_key_value_heads="multi_query_group_num",
    head_dim="kv_channels",
    rms_norm_eps="layernorm_epsilon",
    max_position_embeddings="seq_length",
    attention_bias="add_qkv_bias",
)
stand_in("solar", "SolarForCausalLM", LlamaConfig, LlamaForCausalLM, with_skips)
stand_in("nemotron-nas", "DeciLMForCausalLM", LlamaConfig, LlamaForCausalLM, with_other_layers)
stand_in(
    "plamo3",
    "Plamo3ForCausalLM",
    Gemma3TextConfig,
    Gemma3ForCausalLM,
    with_unscaled_embeddings,
    sliding_window="window_size",
)
stand_in("rnj1", "Rnj1ForCausalLM", Gemma3TextConfig, Gemma3ForCausalLM)
stand_in("domyn_edge", "DomynEdgeForCausalLM", Qwen3Config, Qwen3ForCausalLM, with_domyns_layers)
stand_in("pangu_ultra_moe", "PanguUltraMoEForCausalLM", DeepseekV3Config, DeepseekV3ForCausalLM, with_pangus_norms)
stand_in("mistral_large3", "MistralLarge3ForCausalLM", Mistral4Config, Mistral4ForCausalLM)
stand_in("mimo_v2", "MiMoV2ForCausalLM", MiMoV2FlashConfig, MiMoV2FlashForCausalLM)
stand_in(
    "step3_text",
    "Step3TextForCausalLM",
    LlamaConfig,
    LlamaForCausalLM,
    with_steps_layers,
    num_experts="moe_num_experts",
    num_experts_per_tok="moe_top_k",
    norm_topk_prob="norm_expert_weight",
    num_key_value_heads="num_attention_groups",
    max_position_embeddings="max_position_embedding",
)
