"""Variants of families that transformers lacks, with the names of their published checkpoints."""

from __future__ import annotations

from typing import Any

from support.families.base import GLOBAL, LOCAL, YARN, Variant, rope
from support.families.experts import _LATENT

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}

_SHORT_YARN = {**YARN, "original_max_position_embeddings": 32}


def _block(group: int | None, size: int | None) -> dict[str, Any]:
    """A layer with so many query heads for each KV head, and an MLP of this size; None for no such part."""
    attention = {"no_op": group is None, "n_heads_in_group": group}
    return {"attention": attention, "ffn": {"no_op": size is None, "intermediate_size": size}}


_BLOCKS = [_block(2, 96), _block(4, 64), _block(None, 80), _block(None, None), _block(1, None)]

PUBLISHED: dict[str, Variant] = {
    "internlm3": ("internlm3", {"head_dim": 24}, {"adds": {"architectures": ["InternLM3ForCausalLM"]}}),
    "iquestcoder": ("iquestcoder", {"head_dim": 24}, {"adds": {"architectures": ["IQuestCoderForCausalLM"]}}),
    "iquestloopcoder": (
        "iquestloopcoder",
        {"head_dim": 16, "loop_num": 3, "loop_window_size": 20},
        {"hub_layout": True},
    ),
    "orion": ("orion", {"rope_parameters": rope(10_000.0)}, {"old_rope": True}),
    "telechat3": ("telechat3", {"head_dim": 24, "rope_parameters": rope(1e6)}, {}),
    "telechat": ("telechat", {"num_key_value_heads": 4}, {"old_rope": True, "hub_layout": True}),
    "teleflm": (
        "teleflm",
        {"use_mup": True, "mup_scale_factor": 4.0, "output_mult": 6.0, "input_mult": 1.5},
        {"old_rope": True},
    ),
    "pangu_embedded": ("pangu_embedded", {"bias": True, "rope_parameters": rope(16e6)}, {"old_rope": True}),
    "deepseek": (
        "deepseek",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
        },
        {"old_rope": True, "adds": {"scoring_func": "softmax"}},
    ),
    "bailing_moe": (
        "bailing_moe",
        {**_EXPERTS, "num_shared_experts": 2, "norm_topk_prob": True, "head_dim": 16},
        {"old_rope": True, "hub_layout": True, "adds": {"use_bias": False, "use_qkv_bias": False}},
    ),
    "bailing_moe-normed-head": (
        "bailing_moe",
        {
            **_EXPERTS,
            "first_k_dense_replace": 0,
            "num_shared_experts": 1,
            "norm_topk_prob": False,
            "norm_head": True,
            "vocab_size": 321,
        },
        {"old_rope": True, "hub_layout": True, "adds": {"use_bias": False, "use_qkv_bias": False}, "seed": 1},
    ),
    "bailing_moe_v2": (
        "bailing_moe_v2",
        {
            **_EXPERTS,
            "num_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 24,
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": rope(600_000.0, partial_rotary_factor=0.5),
        },
        {
            "old_rope": True,
            "hub_layout": True,
            "adds": {"use_bias": False, "score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        },
    ),
    "param2moe": (
        "param2moe",
        {
            **_EXPERTS,
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "head_dim": 16,
            "use_qk_norm": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "use_qkv_bias": True,
            "rope_parameters": rope(10_000.0, partial_rotary_factor=1.0),
        },
        {
            "old_rope": True,
            "hub_layout": True,
            "adds": {"use_bias": False, "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 48},
        },
    ),
    "chatglm": (
        "chatglm",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": rope(50_000.0, partial_rotary_factor=0.5)},
        {
            "hub_layout": True,
            "without": ["rope_parameters"],
            "adds": {"rope_ratio": 5.0, "original_rope": True, "multi_query_attention": True, "add_bias_linear": False},
        },
    ),
    "solar": (
        "solar",
        {
            "num_hidden_layers": 6,
            "bskcn_1": [1, 3],
            "bskcn_2": [2],
            "bskcn_3": [2, 5],
            "bskcn_4": [4],
            "bskcn_tv": [0.9, 0.8],
        },
        {"old_rope": True},
    ),
    "nemotron-nas": (
        "nemotron-nas",
        {"num_hidden_layers": 5, "head_dim": 16, "block_configs": _BLOCKS},
        {"old_rope": True, "without": ["num_key_value_heads", "intermediate_size"]},
    ),
    "nemotron-nas-one-size": (
        "nemotron-nas",
        {"head_dim": 16, "block_configs": [_block(2, 96), _block(4, 96), _block(1, 96)], "vocab_size": 321},
        {
            "old_rope": True,
            "without": ["block_configs", "num_key_value_heads"],
            "adds": {"num_key_value_heads_per_layer": [2, 1, 4]},
        },
    ),
    "plamo3": (
        "plamo3",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "hidden_activation": "silu",
            "sliding_window": 20,
            "layer_types": [LOCAL, GLOBAL] * 2,
            "rope_parameters": {LOCAL: rope(10_000.0), GLOBAL: rope(1e6)},
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        {
            "hub_layout": True,
            "without": ["layer_types", "rope_parameters", "hidden_activation", "_sliding_window_pattern"],
            "adds": {"rope_theta": 1e6, "rope_local_theta": 10_000, "sliding_window_pattern": 2},
        },
    ),
    "rnj1": (
        "rnj1",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 96,
            "layer_types": [GLOBAL] * 3,
            "rope_parameters": {GLOBAL: rope(10_000.0, "yarn", **YARN), LOCAL: rope(10_000.0)},
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "domyn_edge": (
        "domyn_edge",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": [LOCAL, GLOBAL] * 2,
            "position_layers": ["rope", "nope", "rope", "nope"],
        },
        {
            "without": ["layer_types", "sliding_window", "head_dim"],
            "adds": {
                "window_sizes": [[19, 0], [-1, 0], [19, 0], [-1, 0]],
                "per_layer_config": {str(i): {"head_dim": 24} for i in range(4)},
            },
        },
    ),
    "pangu_ultra_moe": (
        "pangu_ultra_moe",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope(25.6e6),
        },
        {
            "old_rope": True,
            "hub_layout": True,
            "without": ["n_group", "topk_group"],
            "adds": {"sandwich_norm": True, "router_enable_expert_bias": True},
        },
    ),
    "mistral_large3": (
        "mistral_large3",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": rope(
                10_000.0, "yarn", mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.3, **_SHORT_YARN
            ),
        },
        {
            "hub_layout": True,
            "adds": {
                "rope_parameters": rope(10_000.0, "yarn", mscale_all_dim=1.0, **_SHORT_YARN),
                "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 32},
            },
        },
    ),
    "mimo_v2": (
        "mimo_v2",
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
        {"hub_layout": True, "adds": {"attention_projection_layout": "fused_qkv"}},
    ),
    "step3_text": (
        "step3_text",
        {
            "num_attention_groups": 1,
            "head_dim": 24,
            "share_q_dim": 40,
            "moe_num_experts": 8,
            "moe_top_k": 3,
            "norm_expert_weight": True,
            "moe_intermediate_size": 24,
            "moe_layers_enum": "1,2",
        },
        {"old_rope": True, "hub_layout": True, "adds": {"share_expert_dim": 24}},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **{key: value for key, value in _LATENT.items() if key not in ("n_routed_experts", "v_head_dim")},
            "num_local_experts": 8,
            "v_head_dim": 24,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        {
            "hub_layout": True,
            "without": ["layer_types", "mlp_layer_types", "linear_head_dim"],
            "adds": {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 16, "layer_group_size": 2},
        },
    ),
    "bailing_moe_linear": (
        "bailing_moe_linear",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "group_norm_size": 4,
            "first_k_dense_replace": 1,
            "rope_parameters": rope(10_000.0),
        },
        {
            "old_rope": True,
            "hub_layout": True,
            "without": ["n_routed_experts", "n_shared_experts"],
            "adds": {
                "num_experts": 8,
                "num_shared_experts": 1,
                "score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "use_qk_norm": True,
                "partial_rotary_factor": 0.5,
                "group_norm_size": 4,
                "head_dim": 16,
            },
        },
    ),
    "step1": ("step1", {"num_attention_heads": 6, "num_attention_groups": 2, "hidden_size": 48}, {}),
    "step1-biases": (
        "step1",
        {"num_attention_groups": 1, "attention_bias": True, "mlp_bias": True, "vocab_size": 321},
        {"seed": 3},
    ),
}
