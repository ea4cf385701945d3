"""Variants of families of the last two years, and of their predecessors that came late."""

from __future__ import annotations

from support.families.base import GLOBAL, LOCAL, YARN, Variant, rope
from support.families.experts import _EXPERTS, _LATENT

RECENT: dict[str, Variant] = {
    "arcee": ("arcee", {"rope_parameters": rope(10_000.0, "yarn", **YARN), "head_dim": 24}, {}),
    "seed_oss": ("seed_oss", {"head_dim": 24, "attention_bias": True}, {"seed": 1}),
    "nemotron": (
        "nemotron",
        {"rope_parameters": rope(10_000.0, partial_rotary_factor=0.5), "head_dim": 16},
        {"old_rope": True},
    ),
    "nemotron-biases": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
            "vocab_size": 321,
            "rope_parameters": rope(500.0, partial_rotary_factor=0.25),
        },
        {"seed": 1},
    ),
    "exaone4": (
        "exaone4",
        {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "sliding_window_pattern": 4},
        {"without": ["layer_types"]},
    ),
    "exaone4-without-windows": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": [GLOBAL] * 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "apertus": ("apertus", {"rope_parameters": rope(12_000.0, "linear", factor=2.0)}, {}),
    "olmo": ("olmo", {"clip_qkv": None}, {"old_rope": True}),
    "olmo-clipped": ("olmo", {"clip_qkv": 2.5, "num_key_value_heads": 4, "vocab_size": 321}, {}),
    "ministral": (
        "ministral",
        {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL]},
        {},
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 24,
            "rope_parameters": rope(
                1e6, "yarn", llama_4_scaling_beta=0.3, **{**YARN, "original_max_position_embeddings": 32}
            ),
        },
        {},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 24, "tie_word_embeddings": True}, {"old_rope": True}),
    "ernie4_5-biases": ("ernie4_5", {"use_bias": True, "vocab_size": 321, "head_dim": 16}, {}),
    "bitnet": ("bitnet", {}, {}),
    "bitnet-biases": (
        "bitnet",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 321},
        {},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 24, "tie_word_embeddings": True}, {}),
    "hyperclovax": (
        "hyperclovax",
        {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.6, "logits_scaling": 2.0},
        {},
    ),
    "cwm": (
        "cwm",
        {"num_hidden_layers": 4, "head_dim": 24, "sliding_window": 20, "rope_parameters": rope(1e6)},
        {"without": ["layer_types"]},
    ),
    "jais2": ("jais2", {"head_dim": 16}, {}),
    "granite_swa": (
        "granite_swa",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_rope_theta": [500.0, 10_000.0, 10_000.0, 0.0],
        },
        {"without": ["layer_types"]},
    ),
    "muse_glimmer_text": (
        "muse_glimmer_text",
        {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 20,
            "rope_parameters": rope(500.0),
            "final_logit_softcapping": 6.0,
            "output_multiplier": 0.7,
            "qk_scale_factor": 2.0,
        },
        {"without": ["layer_types", "layer_rope_theta"]},
    ),
    "hrm_text": ("hrm_text", {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2, "head_dim": 16}, {}),
    "hrm_text-one-layer-each": (
        "hrm_text",
        {
            "num_hidden_layers": 1,
            "H_cycles": 3,
            "L_cycles": 1,
            "head_dim": 24,
            "vocab_size": 321,
            "embedding_scale": 2.0,
            "tie_word_embeddings": True,
            "rope_parameters": rope(500.0),
        },
        {"seed": 1},
    ),
    "youtu": (
        "youtu",
        {
            **{key: _LATENT[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "minicpm3": (
        "minicpm3",
        {
            **{key: _LATENT[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "tie_word_embeddings": True,
            "scale_emb": 2.0,
            "dim_model_base": 96,
        },
        {"without": ["v_head_dim"]},
    ),
}
RECENT_EXPERTS: dict[str, Variant] = {
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
        {},
    ),
    "ernie4_5_moe-between": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 22,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "moe_topk": 3,
            "intermediate_size": 48,
            "rope_parameters": rope(10_000.0, "dynamic", alpha=100.0, factor=1.0),
        },
        {},
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "intermediate_size": 38,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "head_dim": 24,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "attn_scale": 0.7,
            "rope_parameters": rope(500_000.0),
        },
        {"without": ["layer_types"], "seed": 4},
    ),
    "llama4-without-norms": (
        "llama4_text",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 24,
            "head_dim": 16,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 48,
            "vocab_size": 321,
        },
        {"without": ["layer_types"], "seed": 5},
    ),
    "olmoe": (
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "norm_topk_prob": False},
        {},
    ),
    "olmoe-clipped": (
        "olmoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 38,
            "norm_topk_prob": True,
            "clip_qkv": 3.0,
            "vocab_size": 321,
        },
        {},
    ),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 38,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,
        },
        {},
    ),
    "dots1": (
        "dots1",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
        {"without": ["layer_types"]},
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 38,
            "head_dim": 24,
            "rope_parameters": rope(5e6, partial_rotary_factor=0.5),
        },
        {"adds": {"scoring_func": "sigmoid", "use_routing_bias": True}},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 24,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
        {"without": ["qk_head_dim", "mlp_layer_types"]},
    ),
}
