"""Variants of the families with RMS norms and gated MLPs, other than the first."""

from __future__ import annotations

from support.families.base import GLOBAL, LOCAL, MAX_POSITIONS, YARN, Variant, rope

_LONGROPE_SHORT = [1.0, 1.05, 1.1, 1.3, 1.2, 1.6, 1.9, 2.5]
_LONGROPE_LONG = [1.0, 1.4, 2.2, 3.1, 4.7, 8.0, 15.0, 24.0]
_LONGROPE = {"short_factor": _LONGROPE_SHORT, "long_factor": _LONGROPE_LONG}

_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 20,
    "layer_types": [LOCAL, GLOBAL] * 2,
    "tie_word_embeddings": True,
}

RMS_NORM: dict[str, Variant] = {
    "internlm2": (
        "internlm2",
        {"num_attention_heads": 8, "rope_parameters": rope(1_000_000.0, "dynamic", factor=2.0)},
        {"old_rope": True, "hub_layout": True, "seed": 1},
    ),
    "internlm2-odd-sizes": (
        "internlm2",
        {"num_attention_heads": 6, "hidden_size": 144, "intermediate_size": 70, "vocab_size": 321},
        {"old_rope": True, "hub_layout": True},
    ),
    "minicpm": (
        "minicpm",
        {
            "scale_emb": 1.5,
            "scale_depth": 1.4,
            "dim_model_base": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        {"old_rope": True, "without": ["tie_word_embeddings"]},
    ),
    "minicpm-gqa-untied": (
        "minicpm",
        {"scale_emb": 0.5, "scale_depth": 0.9, "dim_model_base": 40, "num_hidden_layers": 4},
        {"old_rope": True},
    ),
    "mimo": (
        "mimo",
        {"head_dim": 24, "rope_parameters": rope(640_000.0)},
        {
            "old_rope": True,
            "hub_layout": True,
            "without": ["layer_types"],
            "adds": {"attention_bias": True, "num_nextn_predict_layers": 2},
        },
    ),
    "gemma": (
        "gemma",
        {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True},
        {"old_rope": True, "without": ["tie_word_embeddings"], "adds": {"hidden_activation": "gelu_pytorch_tanh"}},
    ),
    "gemma-multi-head": (
        "gemma",
        {"num_key_value_heads": 4, "head_dim": 40, "tie_word_embeddings": True, "vocab_size": 333},
        {},
    ),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 20,
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
        {"old_rope": True, "without": ["layer_types", "tie_word_embeddings"], "seed": 8},
    ),
    "gemma2-without-caps": (
        "gemma2",
        {
            "num_key_value_heads": 1,
            "head_dim": 40,
            "query_pre_attn_scalar": 20,
            "sliding_window": 32,
            "layer_types": [GLOBAL, LOCAL, GLOBAL],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 18,
            "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL],
            "rope_parameters": {LOCAL: rope(100.0), GLOBAL: rope(1_000_000.0, "linear", factor=8.0)},
            "tie_word_embeddings": True,
        },
        {
            "old_rope": True,
            "without": ["layer_types", "tie_word_embeddings", "_sliding_window_pattern"],
            "adds": {"sliding_window_pattern": 3},
        },
    ),
    "gemma3-layer-types": (
        "gemma3_text",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 40,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "rope_parameters": {LOCAL: rope(500.0), GLOBAL: rope(20_000.0)},
            "tie_word_embeddings": True,
        },
        {},
    ),
    "phi3": (
        "phi3",
        {"num_key_value_heads": 4, "sliding_window": 24, "original_max_position_embeddings": MAX_POSITIONS},
        {"old_rope": True},
    ),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": rope(10_000.0, "longrope", **_LONGROPE), "original_max_position_embeddings": 64},
        {"old_rope": True},
    ),
    "phi3-longrope-partial": (
        "phi3",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "intermediate_size": 70,
            "tie_word_embeddings": True,
            "sliding_window": 262_144,
            "original_max_position_embeddings": 128,
            "rope_parameters": rope(
                10_000.0,
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=_LONGROPE_SHORT[:6],
                long_factor=_LONGROPE_LONG[2:],
            ),
        },
        {"old_rope": True},
    ),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": rope(10_000.0, "longrope", **_LONGROPE), "original_max_position_embeddings": 200},
        {},
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 4, "rope_parameters": rope(500_000.0)}, {"old_rope": True, "seed": 1}),
    "olmo2-grouped": (
        "olmo2",
        {"num_attention_heads": 6, "hidden_size": 144, "intermediate_size": 70, "vocab_size": 321},
        {},
    ),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "num_key_value_heads": 4,
            "sliding_window": 20,
            "rope_parameters": {
                LOCAL: rope(500_000.0),
                GLOBAL: rope(500_000.0, "yarn", attention_factor=1.2079, **YARN),
            },
        },
        {"old_rope": True, "without": ["layer_types"]},
    ),
    "olmo3-layer-types": (
        "olmo3",
        {
            "hidden_size": 96,
            "sliding_window": 32,
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "vocab_size": 321,
            "rope_parameters": {LOCAL: rope(500.0), GLOBAL: rope(50_000.0, "yarn", **YARN)},
        },
        {},
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.35,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
        {"old_rope": True},
    ),
    "granite-biases": (
        "granite",
        {
            "attention_multiplier": 0.4,
            "embedding_multiplier": 0.7,
            "residual_multiplier": 1.3,
            "logits_scaling": 0.6,
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 321,
        },
        {},
    ),
    "glm": (
        "glm",
        {"head_dim": 24, "attention_bias": True, "rope_parameters": rope(10_000.0, partial_rotary_factor=0.5)},
        {"old_rope": True},
    ),
    "glm-without-biases": (
        "glm",
        {
            "num_attention_heads": 8,
            "intermediate_size": 70,
            "attention_bias": False,
            "head_dim": 16,
            "vocab_size": 321,
            "tie_word_embeddings": True,
            "rope_parameters": rope(5_000.0, partial_rotary_factor=0.75),
        },
        {},
    ),
    "glm4": (
        "glm4",
        {"head_dim": 32, "attention_bias": False, "rope_parameters": rope(10_000.0, partial_rotary_factor=0.5)},
        {"old_rope": True},
    ),
    "glm4-biases": (
        "glm4",
        {
            "num_key_value_heads": 1,
            "intermediate_size": 70,
            "attention_bias": True,
            "head_dim": 24,
            "vocab_size": 321,
            "rope_parameters": rope(500.0, partial_rotary_factor=0.5),
        },
        {},
    ),
    "smollm3": (
        "smollm3",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "tie_word_embeddings": True,
            "rope_parameters": rope(5_000_000.0),
        },
        {"old_rope": True, "without": ["tie_word_embeddings"]},
    ),
    "smollm3-windows": (
        "smollm3",
        {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {"without": ["no_rope_layers", "layer_types"]},
    ),
    "gemma4": (
        "gemma4_text",
        {**_GEMMA4, "global_head_dim": 24, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        {"hub_layout": True, "seed": 1},
    ),
    "gemma4-values-are-keys": (
        "gemma4_text",
        {
            **_GEMMA4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 20.0,
            "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL],
            "vocab_size": 321,
        },
        {"without": ["per_layer_config"], "adds": {"global_head_dim": 32, "num_global_key_value_heads": 1}, "seed": 1},
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        {"seed": 1},
    ),
    "gemma4-other-layers": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "num_kv_shared_layers": 3,
            "global_head_dim": 24,
            "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, LOCAL, GLOBAL],
        },
        {"seed": 2},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 2,
            "laurel_rank": 12,
            "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
            "rope_parameters": {LOCAL: rope(10_000.0), GLOBAL: rope(1_000_000.0)},
        },
        {},
    ),
    "gemma3n-other-sizes": (
        "gemma3n_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [LOCAL] * 4 + [GLOBAL],
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "intermediate_size": [96, 96, 64, 64, 96],
            "vocab_size": 330,
        },
        {"without": ["layer_types", "activation_sparsity_pattern"], "seed": 1},
    ),
}
