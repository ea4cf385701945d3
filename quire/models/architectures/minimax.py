"""MiniMax-M2: experts in every layer, and one norm each over all heads of queries and of keys."""

from quire.layers.specs import MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def minimax_m2(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    mlp = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 8),
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        scoring="sigmoid",
        correction_bias=True,
    )
    return decoder_spec(
        {"head_dim": 128, **config},
        attention={"qk_norm": norm, "qk_norm_over": "all"},
        mlp=mlp,
        norm=norm,
        names=NAMES["mixtral"] | NAMES["minimax_m2"],
    )
