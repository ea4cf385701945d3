"""An architecture as data: what a decoder-only model's config says, in Quire's words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.layers.attention import AttentionSpec
from quire.layers.rotary import RotarySpec

HfConfig = Mapping[str, Any]  # a checkpoint's config.json

# Names of the checkpoint tensors that Llama introduced and most models follow; {i} is the layer.
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head.weight",
}


@dataclass(frozen=True)
class DecoderSpec:
    """Everything in which decoder-only models differ. windows: tokens that each layer's queries see, None for all."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionSpec
    intermediate_size: int
    norm_eps: float
    rotary: RotarySpec
    max_positions: int
    windows: tuple[int | None, ...]
    mlp_bias: bool = False
    tie_embeddings: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # endings of checkpoint tensors that are not parameters


Architecture = Callable[[HfConfig], DecoderSpec]


def rotary_spec(config: HfConfig, head_dim: int) -> RotarySpec:
    """From transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    if parameters.get("rope_type", parameters.get("type")) == "llama3":
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return RotarySpec(theta, head_dim, parameters)


def decoder_spec(
    config: HfConfig, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False, **differences: Any
) -> DecoderSpec:
    """The spec of a Llama-like config; an architecture states in `differences` where it is unlike Llama."""
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported yet; supported: silu")
    if quantization := config.get("quantization_config"):
        raise ValueError(f"checkpoints quantized with {quantization.get('quant_method')!r} are not supported yet")
    norm_eps, kv_heads = config.get("rms_norm_eps", 1e-6), config.get("num_key_value_heads") or num_heads
    qk_norm_eps = norm_eps if qk_norm else None
    hidden_size = config["hidden_size"]
    common: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "attention": AttentionSpec(hidden_size, num_heads, kv_heads, head_dim, qkv_bias, output_bias, qk_norm_eps),
        "intermediate_size": config["intermediate_size"],
        "norm_eps": norm_eps,
        "rotary": rotary_spec(config, head_dim),
        "max_positions": config.get("max_position_embeddings", 2048),
        "windows": (None,) * num_layers,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    return DecoderSpec(**{**common, **differences})
