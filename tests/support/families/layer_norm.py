"""Variants of the families with layer norms."""

from __future__ import annotations

from support.families.base import GLOBAL, LOCAL, Variant, rope

LAYER_NORM: dict[str, Variant] = {
    "phi": (
        "phi",
        {"hidden_size": 80, "num_attention_heads": 2, "rope_parameters": rope(10_000.0, partial_rotary_factor=0.4)},
        {"old_rope": True},
    ),
    "phi-query-key-norms": (
        "phi",
        {
            "qk_layernorm": True,
            "intermediate_size": 70,
            "vocab_size": 321,
            "rope_parameters": rope(1_000.0, partial_rotary_factor=0.5),
        },
        {},
    ),
    "opt": (
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
        {"hub_layout": True, "without": ["tie_word_embeddings", "enable_bias", "layer_norm_elementwise_affine"]},
    ),
    "opt-post-norm-projections": (
        "opt",
        {
            "ffn_dim": 70,
            "word_embed_proj_dim": 48,
            "do_layer_norm_before": False,
            "vocab_size": 321,
            "tie_word_embeddings": True,
        },
        {"seed": 6},
    ),
    "opt-without-biases": (
        "opt",
        {
            "ffn_dim": 96,
            "word_embed_proj_dim": 64,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu",
            "tie_word_embeddings": True,
        },
        {},
    ),
    "gpt2": (
        "gpt2",
        {"tie_word_embeddings": True},
        {"hub_layout": True, "without": ["tie_word_embeddings", "n_inner"]},
    ),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {
            "n_inner": 70,
            "n_embd": 80,
            "n_head": 2,
            "vocab_size": 333,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "activation_function": "gelu",
            "tie_word_embeddings": True,
        },
        {},
    ),
    "gpt_neox": (
        "gpt_neox",
        {"num_attention_heads": 2, "rope_parameters": rope(10_000.0, partial_rotary_factor=0.25)},
        {"old_rope": True, "hub_layout": True},
    ),
    "gpt_neox-sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "intermediate_size": 70,
            "vocab_size": 321,
            "rope_parameters": rope(1_000.0, partial_rotary_factor=1.0),
        },
        {"hub_layout": True, "seed": 8},
    ),
    "gpt_neox-tied-without-attention-biases": (
        "gpt_neox",
        {
            "attention_bias": False,
            "hidden_size": 96,
            "tie_word_embeddings": True,
            "rope_parameters": rope(10_000.0, partial_rotary_factor=0.5),
        },
        {},
    ),
    "cohere": (
        "cohere",
        {"num_key_value_heads": 4, "logit_scale": 0.75, "tie_word_embeddings": True, "rope_parameters": rope(8e6)},
        {"old_rope": True, "without": ["tie_word_embeddings"]},
    ),
    "cohere-query-key-norms": (
        "cohere",
        {
            "num_attention_heads": 8,
            "hidden_size": 128,
            "intermediate_size": 70,
            "logit_scale": 0.8,
            "use_qk_norm": True,
            "vocab_size": 333,
            "tie_word_embeddings": True,
            "rope_parameters": rope(75_000.0),
        },
        {},
    ),
    "falcon": (
        "falcon",
        {"hidden_size": 96, "bias": False, "multi_query": True, "parallel_attn": True, "tie_word_embeddings": True},
        {
            "old_rope": True,
            "hub_layout": True,
            "without": ["tie_word_embeddings", "num_kv_heads", "ffn_hidden_size", "rope_scaling"],
        },
    ),
    "falcon-40b": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 8,
            "num_kv_heads": 2,
            "bias": False,
            "tie_word_embeddings": True,
        },
        {"old_rope": True, "without": ["tie_word_embeddings", "num_ln_in_parallel_attn", "ffn_hidden_size"]},
    ),
    "falcon-11b": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "ffn_hidden_size": 70,
            "vocab_size": 321,
            "bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": rope(500_042.0),
        },
        {},
    ),
    "falcon-rw": (
        "falcon",
        {
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
            "hidden_size": 128,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
        },
        {"without": ["rope_parameters", "tie_word_embeddings"]},
    ),
    "falcon-rw-6-heads": (
        "falcon",
        {
            "alibi": True,
            "bias": True,
            "multi_query": True,
            "parallel_attn": True,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
        {"seed": 12},
    ),
    "falcon-sequential": (
        "falcon",
        {"bias": True, "multi_query": False, "parallel_attn": False, "tie_word_embeddings": True},
        {},
    ),
    "stablelm": (
        "stablelm",
        {
            "hidden_size": 96,
            "num_key_value_heads": 4,
            "use_qkv_bias": True,
            "rope_parameters": rope(10_000.0, partial_rotary_factor=0.25),
        },
        {"old_rope": True, "seed": 2},
    ),
    "stablelm-parallel-query-key-norms": (
        "stablelm",
        {
            "hidden_size": 128,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "vocab_size": 321,
            "rope_parameters": rope(1_000.0, partial_rotary_factor=0.5),
        },
        {},
    ),
    "cohere2": (
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "logit_scale": 0.75,
            "tie_word_embeddings": True,
            "rope_parameters": rope(50_000.0),
        },
        {
            "old_rope": True,
            "without": ["layer_types", "tie_word_embeddings"],
            "adds": {"sliding_window_pattern": 4, "position_embedding_type": "rope_gptj", "use_qk_norm": False},
        },
    ),
    "cohere2-layer-types": (
        "cohere2",
        {
            "hidden_size": 96,
            "intermediate_size": 70,
            "sliding_window": 32,
            "layer_types": [GLOBAL, LOCAL, LOCAL],
            "logit_scale": 0.9,
            "tie_word_embeddings": True,
            "vocab_size": 333,
        },
        {},
    ),
}
