"""The shapes of common models, from their config.json files. Weights are never needed here.

Sources: the config.json files published by the models' authors. Fields that do not affect shapes are omitted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

_SILU = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    **_SILU,
}

SHAPES: dict[str, Config] = {
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "qwen3-30b-a3b": {
        **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "llama-3-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "llama-3-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 3584,
        "intermediate_size": 14_336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "max_position_embeddings": 8192, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma-3-27b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 5376,
        "intermediate_size": 21_504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "max_position_embeddings": 131_072, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rms_norm_eps": 1e-6, "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 168, "sliding_window_pattern": 6,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131_072, "rope_theta": 150_000, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129_280,
        "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "first_k_dense_replace": 3, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "max_position_embeddings": 163_840, "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        **_SILU,
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32_064, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "sliding_window": 2047, "tie_word_embeddings": False,
    },
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50_272, "hidden_size": 4096,
        "ffn_dim": 16_384, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 4096, "do_layer_norm_before": True, "activation_function": "relu",
    },
    "bge-m3": {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": 250_002, "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "type_vocab_size": 1,
        "max_position_embeddings": 8194, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "pad_token_id": 1,
    },
    "modernbert": {
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 50_368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "norm_eps": 1e-5,
        "max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "hidden_activation": "gelu",
    },
    "embedding-gemma": {
        "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 256, "max_position_embeddings": 2048, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
        "rms_norm_eps": 1e-6, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": True,
    },
    "granite-4-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100_352,
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_hidden_layers": 40,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "max_position_embeddings": 131_072, "layer_types": ["mamba", "attention"],
    },
    "qwen3-next-80b": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151_936,
        "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 262_144,
        "rope_theta": 1e7, "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi-linear-48b": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163_840,
        "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "routed_scaling_factor": 2.446, "model_max_length": 1_048_576,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba-1.5-mini": {
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "vocab_size": 65_536, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 256, "max_position_embeddings": 262_144, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "rwkv7-1.5b": {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": 65_536, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 24, "head_dim": 64, "decay_low_rank_dim": 96,
        "a_low_rank_dim": 96, "gate_low_rank_dim": 256, "v_low_rank_dim": 64, "norm_eps": 1e-5, "hidden_act": "sqrelu",
        "max_position_embeddings": 1_048_576,
    },
    "flan-t5-xl": {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 32_128, "d_model": 2048,
        "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 32, "n_positions": 512,
        "max_position_embeddings": 512,  # called n_positions
        "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "tie_word_embeddings": False,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": 152_064,
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 128_000, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653, "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
        },
    },
    "tiny": {
        **_QWEN3, "vocab_size": 16_384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

SHAPES["deepseek-v3.2"] = {
    **SHAPES["deepseek-v3"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}

_LAYERS = {  # one layer of each kind; unlisted models need 1
    "gemma-2-9b": 2, "gemma-3-27b": 6, "gpt-oss-120b": 2, "deepseek-v3": 4, "deepseek-v3.2": 4, "modernbert": 3,
    "embedding-gemma": 6, "granite-4-h-tiny": 2, "qwen3-next-80b": 2, "kimi-linear-48b": 2,
    "jamba-1.5-mini": 2, "rwkv7-1.5b": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A model, and the number of GPUs that share it."""

    shape: str
    ranks: int = 1

    def __str__(self) -> str:
        return self.shape if self.ranks == 1 else f"{self.shape}, {self.ranks} ranks"


SERVED = (
    Served("llama-3-8b"),
    Served("qwen3-0.6b"),
    Served("deepseek-v3", 8),
    Served("gpt-oss-120b"),
    Served("gemma-2-9b"),
    Served("qwen3-30b-a3b"),
    Served("llama-3-70b", 8),
    Served("gemma-3-27b"),
    Served("phi-3-mini"),
    Served("qwen3-8b"),
    Served("llama-3-70b", 4),
    Served("opt-6.7b"),
    Served("llama-3-8b", 4),
    Served("llama-3-8b", 8),
    Served("llama-3-70b"),
)

FORMATS: dict[str, Config] = {  # quantization_config of checkpoints
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def few_layers(name: str) -> Config:
    """Return the config with one layer of each kind, which launches the same kernels as all layers."""
    config = {**SHAPES[name], "num_hidden_layers": _LAYERS.get(name, 1)}
    if name.startswith("deepseek-v3"):
        config["first_k_dense_replace"] = 3
    config.update((field, 1) for field in ("num_layers", "num_decoder_layers") if field in config)  # T5
    if "vision_config" in config:
        config["vision_config"] = {**config["vision_config"], "depth": 2, "fullatt_block_indexes": [1]}
    return config


def write_config(directory: Path, config: Config) -> Path:
    """Write a checkpoint without weights, for --load-format dummy, with the bundled model's tokenizer."""
    from quire.checkpoints.hub import bundled_model

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for file in bundled_model().glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory
