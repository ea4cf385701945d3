"""Variants of the families with recurrent layers."""

from __future__ import annotations

from support.families.base import Variant, rope

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 2}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": rope(1_000_000.0, partial_rotary_factor=0.25),
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
_KIMI = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "linear_head_dim": 16, "linear_num_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_experts": 8,
    "num_experts_per_token": 3, "moe_intermediate_size": 24, "num_shared_experts": 1, "q_lora_rank": None,
}  # fmt: skip

_JAMBA = {
    "mamba_d_state": 24,
    "mamba_dt_rank": 12,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
}
_NEMOTRON3 = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}

_ZAMBA2 = {
    "mamba_d_state": 24,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_key_value_heads": 4,
    "adapter_rank": 12,
    "tie_word_embeddings": True,  # otherwise transformers does not share the blocks either
    "pad_token_id": 0,
}

STATES: dict[str, Variant] = {
    "mamba": ("mamba", {"state_size": 24, "time_step_rank": 12}, {}),
    "falcon_mamba": ("falcon_mamba", {"time_step_rank": 12, "tie_word_embeddings": False}, {}),
    "jamba": ("jamba", _JAMBA, {}),
    "jamba-biases": (
        "jamba",
        {
            **_JAMBA,
            "mamba_d_conv": 3,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "expert_layer_offset": 0,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 16}, {}),
    "mamba2-one-group-biases": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 16,
            "n_groups": 1,
            "use_bias": True,
            "chunk_size": 32,
            "conv_kernel": 3,
        },
        {},
    ),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1]}, {}),
    "bamba-one-group": (
        "bamba",
        {
            **_MAMBA,
            "num_hidden_layers": 4,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "attn_layer_indices": [0, 3],
            "rope_parameters": rope(500_000.0),
        },
        {},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        {},
    ),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        {
            **_MAMBA,
            "mamba_n_groups": 1,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
        {},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "head_dim": 24,
            "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "num_hidden_layers": 5,
        },
        {},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **_NEMOTRON3,
            "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        {"seed": 3},
    ),
    "nemotron_h-latent-experts": (
        "nemotron_h",
        {
            **_NEMOTRON3,
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
            "moe_latent_size": 40,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "nemotron_h-puzzle": (
        "nemotron_h",
        {**_NEMOTRON3, "layer_types": ["linear_attention", "moe", "full_attention", "moe"], "vocab_size": 321},
        {
            "seed": 3,
            "adds": {
                "architectures": ["NemotronHPuzzleForCausalLM"],
                "n_routed_experts": 2,  # what layers have instead is in their blocks; see REFERENCE_CONFIG
                "moe_intermediate_size": 10,
                "num_key_value_heads": 1,
                "block_configs": [
                    {"block_type": "mamba"},
                    {
                        "block_type": "moe",
                        **{key: _NEMOTRON3[key] for key in ("n_routed_experts", "moe_intermediate_size")},
                    },
                    {"block_type": "attention", "num_key_value_heads": 2},
                    {
                        "block_type": "moe",
                        **{key: _NEMOTRON3[key] for key in ("n_routed_experts", "moe_intermediate_size")},
                    },
                ],
            },
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **_ZAMBA2,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 2,
            "use_mem_rope": True,
        },
        {},
    ),
    "zamba2-one-block": (
        "zamba2",
        {
            **_ZAMBA2,
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
            "mamba_ngroups": 1,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.8,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.6,
            "mlp_multipliers": [0.8, 1.2],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.8,
        },
        {},
    ),
    "falcon_h1-norm-before-gate": (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
        },
        {},
    ),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_EXPERTS}, {"hub_layout": True}),
    "qwen3_5_text": (
        "qwen3_5_text",
        {**_DELTA, "linear_num_key_heads": 4, "tie_word_embeddings": True},
        {"hub_layout": True},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS}, {"seed": 1, "hub_layout": True}),
    "kimi_linear": ("kimi_linear", _KIMI, {"hub_layout": True}),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        {"hub_layout": True},
    ),
    "olmo_hybrid-without-rotation": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "vocab_size": 321,
        },
        {"hub_layout": True, "without": ["linear_key_head_dim", "linear_value_head_dim"], "seed": 1},
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
        },
        {"old_rope": True},
    ),
    "lfm2-biases": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "lfm3": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "head_dim": 24,
            "sliding_window": 20,
            "tie_word_embeddings": True,
        },
        {},
    ),
    "lfm3-without-gates": (
        "lfm3",
        {
            "layer_types": ["full_attention", "conv", "sliding_attention"],
            "head_dim": 16,
            "conv_L_cache": 4,
            "conv_bias": True,
            "sliding_window": 24,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
            "vocab_size": 321,
        },
        {"seed": 1},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
        {},
    ),
    "rwkv7": ("rwkv7", {}, {}),
    "rwkv7-other-widths": (
        "rwkv7",
        {"hidden_size": 96, "head_dim": 24, "num_hidden_layers": 2, "norm_first": False, "intermediate_size": 128},
        {"without": ["intermediate_size"], "adds": {"hidden_ratio": 4 / 3, "value_dim": [96, 96]}},
    ),
}
