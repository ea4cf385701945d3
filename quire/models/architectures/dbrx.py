"""DBRX: layer norms without biases, clipped queries, keys and values, and experts in every layer."""

from quire.layers.specs import MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def dbrx(config: HfConfig) -> DecoderSpec:
    own = config.get("attn_config") or {}
    ffn = config.get("ffn_config") or {}
    order = ffn.get("moe_normalize_expert_weights", 1.0)
    if order not in (None, 1):
        raise ValueError("a DBRX with moe_normalize_expert_weights other than 1 is not supported")
    theta = own.get("rope_theta")
    config = {
        **config,
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": own.get("kv_n_heads", 1),
        "max_position_embeddings": config.get("max_seq_len", 2048),
        **({"rope_theta": theta, "rope_parameters": None} if theta else {}),
    }
    experts = MoESpec(
        ffn.get("moe_num_experts", 4),
        ffn.get("moe_top_k", 1),
        ffn.get("ffn_hidden_size", 3584),
        (ffn.get("ffn_act_fn") or {}).get("name", "silu"),
        normalize=order is not None,
        layout="rows",
    )
    return decoder_spec(
        config,
        attention={"qkv_layout": "concatenated", "qkv_clip": own.get("clip_qkv")},
        mlp=experts,
        norm=NormSpec("layer", 1e-5),
        names=NAMES["dbrx"],
    )
