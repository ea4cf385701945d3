"""Llama 1 to 3.x and its relatives, whether they use its architecture name (SmolLM, TinyLlama, Yi) or another one."""

from dataclasses import replace

from quire.layers.attention_spec import AttentionSpec, Temperature
from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows, with_common_names

_LAYER = "model.layers.{i}."


def llama(config: HfConfig, scale: float | None = None) -> DecoderSpec:
    """scale: factor of the attention scores, None for head_dim ** -0.5."""
    bias = bool(config.get("attention_bias", False))
    mlp = MLPSpec(
        config["intermediate_size"], config.get("hidden_act", "silu"), bias=bool(config.get("mlp_bias", False))
    )
    return decoder_spec(config, attention={"qkv_bias": bias, "output_bias": bias, "scale": scale}, mlp=mlp)


def mistral(config: HfConfig) -> DecoderSpec:
    """Mistral: every layer has a sliding window (in the first 7B model; later models have none)."""
    return decoder_spec(config, windows=layer_windows({"sliding_window": 4096, **config}))


def ministral3(config: HfConfig) -> DecoderSpec:
    """Ministral 3: YaRN, and queries that are scaled with the length of the text."""
    attention = {"temperature": mistral_temperature(config)}
    return decoder_spec({"head_dim": 128, **config}, attention=attention, windows=layer_windows(config))


def mistral_temperature(config: HfConfig) -> Temperature | None:
    """Return the temperature in the rotary parameters of a Mistral model."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    scale = rope.get("llama_4_scaling_beta")
    length = rope.get("original_max_position_embeddings")
    return Temperature(scale, length) if scale and length else None


def loop_coder(config: HfConfig) -> DecoderSpec:
    """IQuest-LoopCoder: the text goes through all layers several times. From the second time on, a query attends to the
    last tokens, and to all keys and values of the first time, and gates blend both results."""
    layers = config["num_hidden_layers"]
    loops = config.get("loop_num", 2)
    spec = llama({**config, "num_hidden_layers": layers * loops})
    mixer = spec.mixers[0]
    assert isinstance(mixer, AttentionSpec)
    first = replace(mixer, blends=True)
    return replace(
        spec,
        mixers=tuple(first if i < layers else replace(first, blended=i % layers) for i in range(layers * loops)),
        windows=tuple(None if i < layers else config.get("loop_window_size", 64) for i in range(layers * loops)),
        weights_of=tuple(i % layers for i in range(layers * loops)),
        names={**spec.names, "blend_gate": "model.gate_projections.{i}"},
    )


def arcee(config: HfConfig) -> DecoderSpec:
    """Llama whose MLP has a squared ReLU and no gate."""
    bias = bool(config.get("mlp_bias", False))
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False, bias=bias)
    spec = llama({"mlp_bias": False, **config})
    return replace(spec, mlps=(mlp,) * spec.num_layers)


def bitnet(config: HfConfig) -> DecoderSpec:
    """BitNet b1.58 (arXiv:2402.17764): squared ReLUs, and norms before the output and down projections."""
    config = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **config}
    norm = NormSpec("rms", config["rms_norm_eps"])
    spec = llama(config)
    names = {"attention_sub_norm": f"{_LAYER}self_attn.attn_sub_norm", "mlp_sub_norm": f"{_LAYER}mlp.ffn_sub_norm"}
    mixers = tuple(replace(mixer, sub_norm=norm) for mixer in spec.mixers if isinstance(mixer, AttentionSpec))
    mlps = tuple(replace(mlp, sub_norm=norm) for mlp in spec.mlps if isinstance(mlp, MLPSpec))
    return replace(spec, mixers=mixers, mlps=mlps, names={**spec.names, **names})


def seed_oss(config: HfConfig) -> DecoderSpec:
    """Llama with biases of queries, keys and values, but not of the output."""
    spec = llama({"head_dim": 128, "attention_bias": True, **config})
    output_bias = bool(config.get("attention_out_bias", False))
    mixers = tuple(replace(mixer, output_bias=output_bias) for mixer in spec.mixers if isinstance(mixer, AttentionSpec))
    return replace(spec, mixers=mixers)


def smollm3(config: HfConfig) -> DecoderSpec:
    """Every fourth layer has no rotary embedding. With use_sliding_window, these layers have the windows."""
    spec = llama({"tie_word_embeddings": True, **config})
    interval = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(spec.num_layers)]
    rotary = tuple(r if rotates else None for r, rotates in zip(spec.rotary, rotated, strict=True))
    windows = layer_windows(config, lambda i: not rotated[i]) if config.get("use_sliding_window") else spec.windows
    return replace(spec, rotary=rotary, windows=windows)


def internlm2(config: HfConfig) -> DecoderSpec:
    """Llama with other tensor names, and with q, k and v in one tensor, ordered by KV head."""
    bias = bool(config.get("bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias, "qkv_layout": "by_kv_head"}
    return decoder_spec(config, attention=attention, names=NAMES["internlm2"])


def internlm3(config: HfConfig) -> DecoderSpec:
    """Llama with `bias` and `qkv_bias` in its config (InternLM3, Pangu Embedded)."""
    spec = llama({**config, "attention_bias": config.get("attention_bias") or config.get("bias")})
    qkv_bias = config.get("qkv_bias")
    if qkv_bias is None:
        return spec
    mixers = (replace(mixer, qkv_bias=bool(qkv_bias)) for mixer in spec.mixers if isinstance(mixer, AttentionSpec))
    return replace(spec, mixers=tuple(mixers))


def orion(config: HfConfig) -> DecoderSpec:
    """Llama with layer norms."""
    return replace(llama(config), norm=NormSpec("layer", config.get("rms_norm_eps", 1e-5), bias=True))


def telechat2(config: HfConfig) -> DecoderSpec:
    """TeleChat2: keys and values of each head are in one tensor, and only both output projections have biases."""
    config = with_common_names(
        config,
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="seq_length",
    )
    return decoder_spec(
        config,
        attention={"output_bias": True, "qkv_layout": "key_value"},
        mlp=MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu"), down_bias=True),
        names=NAMES["telechat"],
    )


def teleflm(config: HfConfig) -> DecoderSpec:
    """Tele-FLM: Llama with scaled embeddings and logits, as in the muP parametrization."""
    spec = llama(config)
    if not config.get("use_mup"):
        return spec
    logit_scale = config["output_mult"] / config["mup_scale_factor"]
    return replace(spec, embedding_scale=config.get("input_mult", 1.0), logit_scale=logit_scale)


def granite(config: HfConfig) -> DecoderSpec:
    """Llama with multipliers of embeddings, branches, attention scores and logits."""
    return replace(
        llama(config, scale=config["attention_multiplier"]),
        embedding_scale=config["embedding_multiplier"],
        residual_scale=config["residual_multiplier"],
        logit_scale=1 / config["logits_scaling"],
    )


def hyperclovax(config: HfConfig) -> DecoderSpec:
    """HyperCLOVA X: Granite with norms after the branches as well."""
    multipliers = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    spec = granite({"attention_multiplier": None, **multipliers, **config})
    spec = replace(spec, logit_scale=config.get("logits_scaling", 1.0))
    if not config.get("use_post_norm", True):
        return spec
    names = {"attention_post_norm": f"{_LAYER}post_norm1", "mlp_post_norm": f"{_LAYER}post_norm2"}
    return replace(spec, names={**spec.names, **names})


def cwm(config: HfConfig) -> DecoderSpec:
    """Code World Model: three of four layers have a window."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192, **config}
    return replace(llama(config), windows=layer_windows(config, lambda i: i % 4 != 0))


def jais2(config: HfConfig) -> DecoderSpec:
    """Jais 2: layer norms, squared ReLUs without gates, and biases."""
    spec = arcee({"attention_bias": True, "mlp_bias": True, **config})
    return replace(spec, norm=NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True))


def minicpm(config: HfConfig) -> DecoderSpec:
    """Scaled embeddings, branches and logits, as in the muP parametrization."""
    return replace(
        llama({"tie_word_embeddings": True, **config}),
        embedding_scale=config.get("scale_emb", 1),
        residual_scale=config.get("scale_depth", 1) / config["num_hidden_layers"] ** 0.5,
        logit_scale=config.get("dim_model_base", config["hidden_size"]) / config["hidden_size"],
    )
