"""Step 3 (text): queries through a norm in a low-rank product, one KV head, and experts."""

from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, with_common_names


def step3_text(config: HfConfig) -> DecoderSpec:
    config = with_common_names(config, max_position_embeddings="max_position_embedding")
    layers = range(config["num_hidden_layers"])
    listed = config.get("moe_layers_enum")
    sparse = [int(i) for i in (listed.split(",") if isinstance(listed, str) else listed)] if listed else layers[1:]
    experts = MoESpec(
        config["moe_num_experts"],
        config["moe_top_k"],
        config["moe_intermediate_size"],
        normalize=bool(config.get("norm_expert_weight", False)),
        shared=MLPSpec(config["share_expert_dim"]),
        layout="stacked",
    )
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    return decoder_spec(
        {"head_dim": 256, "rope_theta": 500_000.0, **config, "num_key_value_heads": 1},
        attention={"query_rank": config["share_q_dim"], "query_norm": norm},
        mlp=tuple(experts if i in sparse else MLPSpec(config["intermediate_size"]) for i in layers),
        norm=norm,
        names=NAMES["step3"],
    )
