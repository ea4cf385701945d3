"""ERNIE 4.5: Llama with rotation of neighbouring pairs; larger models have experts in most layers."""

from quire.layers.specs import MLPSpec, MoESpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def ernie(config: HfConfig, mlp: tuple[MLPSpec | MoESpec, ...] | None = None) -> DecoderSpec:
    bias = bool(config.get("use_bias", False))
    config = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, **config}
    attention = {"qkv_bias": bias, "output_bias": bias, "interleaved_rotary": True}
    dense = MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu"), bias=bias)
    return decoder_spec(
        config,
        attention=attention,
        mlp=mlp or dense,
        names=NAMES["ernie_moe"] if mlp else {},
        ignored=(r"rotary_emb\.inv_freq$", r"^model\.mtp_"),
    )


def ernie_moe(config: HfConfig) -> DecoderSpec:
    """A bias corrects the choice of experts, and shared experts process all tokens."""
    act = config.get("hidden_act", "silu")
    size = config["moe_intermediate_size"]
    layers = config["num_hidden_layers"]
    bias = bool(config.get("use_bias", False))
    shared = config.get("moe_num_shared_experts", 2)
    experts = MoESpec(
        config["moe_num_experts"],
        config.get("moe_k", 6),
        size,
        act,
        correction_bias="row",
        shared=MLPSpec(size * shared, act, bias=bias) if shared else None,
    )
    dense = MLPSpec(config["intermediate_size"], act, bias=bias)
    first = config.get("moe_layer_start_index", 1)
    last = config.get("moe_layer_end_index", -1) % layers
    interval = config.get("moe_layer_interval", 1)
    sparse = [(i + 1) % interval == 0 and first <= i <= last for i in range(layers)]
    return ernie(config, tuple(experts if has_experts else dense for has_experts in sparse))
