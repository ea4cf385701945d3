"""Variants of further families with experts."""

from __future__ import annotations

from support.families.base import GLOBAL, LOCAL, YARN, Variant, rope
from support.families.experts import _LATENT

_SMALL = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GRANITE = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}

MIXTURES: dict[str, Variant] = {
    "granitemoe": ("granitemoe", _GRANITE, {"old_rope": True}),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, "shared_intermediate_size": 48}, {}),
    "granitemoe_swa": (
        "granitemoe_swa",
        {
            **_GRANITE,
            "shared_intermediate_size": 48,
            "sliding_window": 20,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "layer_rope_theta": [10_000.0, 0.0, 500.0],
        },
        {},
    ),
    "mistral4": (
        "mistral4",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "rope_parameters": rope(
                10_000.0,
                "yarn",
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
                partial_rotary_factor=0.5,
                **{**YARN, "original_max_position_embeddings": 32},
            ),
        },
        {"seed": 1},
    ),
    "mistral4-groups": (
        "mistral4",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "vocab_size": 321,
            "rope_parameters": rope(10_000.0, "yarn", llama_4_scaling_beta=0.1, partial_rotary_factor=0.5, **YARN),
        },
        {"seed": 2},
    ),
    "flex_olmo": (
        "flex_olmo",
        {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 38},
        {"without": ["norm_topk_prob"]},
    ),
    "exaone_moe": (
        "exaone_moe",
        {**_SMALL, "num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "n_group": 2, "topk_group": 1},
        {"without": ["layer_types", "mlp_layer_types"]},
    ),
    "exaone_moe-dense-between": (
        "exaone_moe",
        {
            **_SMALL,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_shared_experts": 2,
            "norm_topk_prob": False,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 24,
            "v_head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL],
        },
        {},
    ),
    "mimo_v2_flash-first-fields": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 22,
            "head_dim": 32,
            "v_head_dim": 24,
            "num_hidden_layers": 3,
            "attention_value_scale": None,
            "attention_bias": True,
            "layer_types": [GLOBAL, LOCAL, LOCAL],
            "sliding_window": 24,
            "vocab_size": 321,
        },
        {
            "without": ["layer_types", "mlp_layer_types", "rope_parameters"],
            "adds": {
                "hybrid_layer_pattern": [0, 1, 1],
                "moe_layer_freq": [0, 1, 1],
                "sliding_window_size": 23,
                "swa_num_key_value_heads": 4,
                "swa_rope_theta": 10_000.0,
                "rope_theta": 5_000_000.0,
                "partial_rotary_factor": 0.334,
            },
            "seed": 1,
        },
    ),
    "solar_open": (
        "solar_open",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 24,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
        {},
    ),
    "hy_v3": ("hy_v3", {**_SMALL, "head_dim": 24, "rope_parameters": rope(1e6)}, {"without": ["mlp_layer_types"]}),
    "afmoe": (
        "afmoe",
        {**_SMALL, "num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "mup_enabled": True},
        {"without": ["layer_types"]},
    ),
    "afmoe-dense-layers": (
        "afmoe",
        {
            **_SMALL,
            "num_dense_layers": 2,
            "head_dim": 16,
            "num_shared_experts": 1,
            "route_scale": 1.7,
            "sliding_window": 24,
            "layer_types": [GLOBAL, LOCAL, LOCAL],
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
}
