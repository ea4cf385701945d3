"""openPangu-Ultra-MoE: DeepSeek-V3 with norms after the branches as well."""

from dataclasses import replace

from quire.layers.specs import MoESpec, NormSpec
from quire.models.architectures.deepseek import deepseek, latents
from quire.models.spec import NAMES, DecoderSpec, HfConfig


def pangu_ultra_moe(config: HfConfig) -> DecoderSpec:
    own = {"rope_scaling": None, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1}
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    spec = deepseek({**config, **own})
    corrects = bool(config.get("router_enable_expert_bias", False))
    mlps = (replace(mlp, correction_bias=corrects) if isinstance(mlp, MoESpec) else mlp for mlp in spec.mlps)
    names = NAMES["pangu"] if config.get("sandwich_norm", False) else {}
    return replace(
        spec,
        mixers=tuple(replace(mixer, norm=norm) for mixer in latents(spec)),
        mlps=tuple(mlps),
        norm=norm,
        names={**spec.names, **names, "correction_bias": "model.layers.{i}.mlp.e_score_correction_bias"},
    )
