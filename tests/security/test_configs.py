"""A config.json with a wrong field is refused when the engine starts, with an error that names the field."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoints.config_fields import checked
from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError, EngineConfig
from quire.models.description import describe
from quire.models.registry import spec_of

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": 10_000.0,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_STATES = {
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_ssm": 64,
    "mamba_rms_norm": True,
    "ssm_multipliers": [1.0] * 5,
    "mlp_multipliers": [1.0, 1.0],
    "key_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "time_step_limit": [0.0, 1.0],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _TEXT
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_moe": _TEXT
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        "sliding_window": 32,
        "max_window_layers": 2,
        "use_sliding_window": True,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": _TEXT
        | {
            "sliding_window": 32,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 1e4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
    },
    "deepseek_v3": _TEXT
    | _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "qwen2_vl": _TEXT
    | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "image_token_id": 5,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2},
    },
    "falcon_h1": _TEXT | _STATES | {"architectures": ["FalconH1ForCausalLM"]},
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 300,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": "auto",
        "use_conv_bias": True,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 300,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": 256,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 300,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": False,
    },
    "modernbert": _TEXT
    | {
        "architectures": ["ModernBertModel"],
        "global_attn_every_n_layers": 2,
        "local_attention": 32,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "norm_eps": 1e-5,
    },
}
_WRONG = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        1.5,
        7.0,
        -0.5,
        math.nan,
        math.inf,
        10**12,
        10**400,
        1e300,
        "",
        "x",
        "64",
        "a" * 9000,
        [],
        [1],
        [None],
        ["x"],
        [[]],
        {},
        {"x": 1},
        {"factor": "x"},
        [4] * 4,
        ["full_attention"] * 4,
        "gelu",
    ]
)


def _paths(config: dict[str, Any]) -> list[tuple[str, ...]]:
    inner = [(name, key) for name, value in config.items() if isinstance(value, dict) for key in value]
    return [*((name,) for name in config), *inner]


@st.composite
def _mutated(draw: st.DrawFn) -> dict[str, Any]:
    config = deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 3))):
        *outer, name = draw(st.sampled_from(_paths(config)))
        target = config[outer[0]] if outer else config
        if draw(st.booleans()) and draw(st.booleans()):
            del target[name]
        else:
            target[name] = deepcopy(draw(_WRONG))
    return config


def _wrong_types(value: Any, where: str = "spec") -> list[str]:
    """The places of a spec whose values are no numbers although the spec's types say so."""
    if isinstance(value, tuple):
        return [found for i, item in enumerate(value) for found in _wrong_types(item, f"{where}[{i}]")]
    if not is_dataclass(value):
        return []
    wrong = []
    for field in fields(value):
        given, hint = getattr(value, field.name), str(field.type)
        is_int = isinstance(given, int) and not isinstance(given, bool)
        is_number = is_int or (isinstance(given, float) and math.isfinite(given))
        if (
            (hint == "int" and not is_int)
            or (hint == "float" and not is_number)
            or (hint == "str" and type(given) is not str)
        ):
            wrong.append(f"{where}.{field.name}={given!r}")
        if field.name not in ("names", "config"):
            wrong += _wrong_types(given, f"{where}.{field.name}")
    return wrong


def _names_a_field(message: str, config: dict[str, Any]) -> bool:
    known = {key for path in _paths(config) for key in path} | {"architecture"}
    known |= {key for original in CONFIGS.values() for path in _paths(original) for key in path}
    return any(name in message for name in known) or "rope type" in message or "rotary dimension" in message


def _check(config: dict[str, Any]) -> None:
    message, wrong = "", list[str]()
    try:
        wrong = _wrong_types(spec_of(config))
    except ValueError as error:
        message = str(error)
    assert not wrong
    assert len(message) < 6_000
    assert not message or _names_a_field(message, config), message


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_configs_of_these_tests_are_right(name: str) -> None:
    assert not _wrong_types(spec_of(CONFIGS[name]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_mutated())
def test_a_wrong_field_of_any_family_is_named(config: dict[str, Any]) -> None:
    _check(config)


@pytest.mark.nightly
@settings(max_examples=20_000, deadline=None)
@given(_mutated())
def test_a_wrong_field_of_any_family_is_named_in_many_variants(config: dict[str, Any]) -> None:
    _check(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": True}, "config.json: rope_scaling must be an object, got True"),
        ({"rms_norm_eps": "x"}, "config.json: rms_norm_eps must be a finite number, got 'x'"),
        ({"hidden_size": None}, "config.json of a Qwen3ForCausalLM: hidden_size cannot be None"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers must be an integer from 1 to 10,000"),
        ({"rope_scaling": {"factor": "8"}}, "config.json: rope_scaling: factor must be a finite number, got '8'"),
        ({"architectures": "LlamaForCausalLM"}, "config.json: architectures must be a list of strings"),
        ({"layer_types": 5}, "config.json: layer_types must be a list of strings, got 5"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_a_checkpoint_with_a_wrong_field_is_refused_at_start(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    config = json.loads((bundled_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=message.replace("(", "\\(")):
        describe(tmp_path, EngineConfig.create(model=str(tmp_path)).model)


def test_lists_of_the_wrong_length_are_named() -> None:
    with pytest.raises(ConfigError, match="layer_types cannot be"):
        spec_of(CONFIGS["modernbert"] | {"layer_types": ["a", "b"]})


def test_whole_numbers_may_be_written_with_a_point() -> None:
    config = CONFIGS["llama"] | {"max_position_embeddings": 512.0, "rope_scaling": None}
    assert spec_of(config).max_positions == 512


def test_objects_nested_too_deeply_are_refused() -> None:
    config: dict[str, Any] = {}
    for _ in range(5_000):
        config = {"text_config": config}
    with pytest.raises(ConfigError, match="text_config"):
        checked(config)
