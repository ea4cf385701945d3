"""StableLM 2: Llama with layer norms and partial rotation."""

from quire.layers.specs import NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def stablelm(config: HfConfig) -> DecoderSpec:
    parallel = bool(config.get("use_parallel_residual", False))
    eps = config.get("layer_norm_eps", 1e-5)
    names: dict[str, str | None] = {
        f"{k}_norm": f"model.layers.{{i}}.self_attn.{k}_layernorm.norms.{{h}}" for k in "qk"
    }
    if parallel:
        names["mlp_norm"] = None
    qk_norm = NormSpec("layer", eps) if config.get("qk_layernorm") else None
    return decoder_spec(
        {"partial_rotary_factor": 0.25, **config},
        names=names,
        norm=NormSpec("layer", eps, bias=True),
        attention={"qkv_bias": bool(config.get("use_qkv_bias")), "qk_norm": qk_norm, "qk_norm_over": "heads"},
        residual="parallel" if parallel else "sequential",
    )
