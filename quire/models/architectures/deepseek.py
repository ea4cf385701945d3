"""DeepSeek-V2 and V3, and Kimi-K2, which is a V3: latent attention, many small experts, and shared experts that every
token uses. DeepSeek-V3.2 and GLM-5 add sparse attention."""

from dataclasses import replace

from quire.layers.attention_spec import IndexerSpec, LatentAttentionSpec, Temperature
from quire.layers.rotary_spec import rotary_spec, softmax_scale_factor
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.architectures.llama import mistral_temperature
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows


def deepseek(config: HfConfig, mlp: MLPSpec | None = None) -> DecoderSpec:
    """mlp: of all layers, None for experts."""
    is_v3 = (config.get("architectures") or [None])[0] != "DeepseekV2ForCausalLM"
    rotary = rotary_spec(config, config["qk_rope_head_dim"], rotary_dim=config["qk_rope_head_dim"])
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    latent = LatentAttentionSpec(
        config["hidden_size"],
        config["num_attention_heads"],
        config.get("q_lora_rank"),
        config["kv_lora_rank"],
        nope,
        rope,
        config["v_head_dim"],
        NormSpec("rms", 1e-6),
        (nope + rope) ** -0.5 * softmax_scale_factor(rotary),
        bool(config.get("attention_bias", False)),
        bool(config.get("rope_interleave", True)),
    )
    return decoder_spec(
        config,
        mixer=latent,
        mlp=mlp or mixtures(config, is_v3),
        rotary=rotary,
        names=NAMES["deepseek_moe"] | NAMES["deepseek"],
        ignored=with_draft_layers(config),
    )


def deepseek_v1(config: HfConfig) -> DecoderSpec:
    """DeepSeekMoE (arXiv:2401.06066): standard attention, and the experts of DeepSeek-V2."""
    bias = bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias}
    return decoder_spec(config, attention=attention, mlp=mixtures(config, is_v3=False), names=NAMES["deepseek_moe"])


def deepseek_v32(config: HfConfig) -> DecoderSpec:
    """DeepSeek-V3.2. Unlike its attention, its indexers rotate halves."""
    return with_indexers(deepseek({"first_k_dense_replace": 3, "norm_topk_prob": True, **config}), config)


def glm_moe_dsa(config: HfConfig) -> DecoderSpec:
    """GLM-5 and 5.1. Some layers may attend to the tokens that the previous layer has selected."""
    defaults = {"rms_norm_eps": 1e-5, "norm_topk_prob": True, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}
    spec = with_indexers(deepseek({**defaults, **config}), config, bool(config.get("indexer_rope_interleave", True)))
    shares = [kind == "shared" for kind in indexer_types(config)]
    if shares[0]:
        raise ValueError("config.json says that the first layer shares the selection of a layer before")
    mixers = tuple(replace(mixer, shares_selection=s) for mixer, s in zip(latents(spec), shares, strict=True))
    return replace(spec, mixers=mixers)


def with_indexers(spec: DecoderSpec, config: HfConfig, interleaved: bool = False) -> DecoderSpec:
    """Return the spec with sparse attention."""
    indexer = IndexerSpec(config["index_n_heads"], config["index_head_dim"], config["index_topk"], interleaved)
    return replace(spec, mixers=tuple(replace(mixer, indexer=indexer) for mixer in latents(spec)))


def latents(spec: DecoderSpec) -> list[LatentAttentionSpec]:
    return [mixer for mixer in spec.mixers if isinstance(mixer, LatentAttentionSpec)]


def indexer_types(config: HfConfig) -> list[str]:
    """Return for each layer "full" if it has its own indexer, or "shared". Configs have a list, a string with one
    letter per layer, or the number of layers that share an indexer."""
    layers = config["num_hidden_layers"]
    pattern = config.get("index_topk_pattern")
    if config.get("indexer_types"):
        return list(config["indexer_types"])
    if pattern:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every = max(config.get("index_topk_freq") or 1, 1)
    offset = config.get("index_skip_topk_offset", 2)
    return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]


def glm4_moe_lite(config: HfConfig) -> DecoderSpec:
    """GLM-4.7-Flash."""
    return deepseek({"rms_norm_eps": 1e-5, "norm_topk_prob": True, "first_k_dense_replace": 1, **config})


def mistral4(config: HfConfig) -> DecoderSpec:
    """Mistral 4 (Mistral Small 4): softmax over the experts, and queries that are scaled with the length of the
    text."""
    spec = deepseek({"rms_norm_eps": 1e-6, "norm_topk_prob": True, **config})
    temperature = mistral_temperature(config)

    def changed(mlp: MLPSpec | MoESpec | None) -> MLPSpec | MoESpec | None:
        if not isinstance(mlp, MoESpec):
            return mlp
        return replace(mlp, scoring="softmax", correction_bias=False, layout="stacked")

    names = {role: NAMES["qwen_moe"][role] for role in ("experts_gate_up", "experts_down")}
    return replace(
        spec,
        mixers=tuple(replace(mixer, temperature=temperature) for mixer in latents(spec)),
        mlps=tuple(map(changed, spec.mlps)),
        names={**spec.names, **names},
    )


def mistral_large3(config: HfConfig) -> DecoderSpec:
    """Mistral Large 3, with the tensors' names of Mistral's own format. YaRN has DeepSeek's mscale of 1, unless
    attention_factor replaces it."""
    rope = {"mscale": 1.0, **(config.get("rope_parameters") or {})}
    if rope.get("attention_factor"):
        rope.pop("mscale_all_dim", None)
    spec = mistral4({**config, "rope_parameters": rope})
    mlps = (replace(mlp, layout="separate") if isinstance(mlp, MoESpec) else mlp for mlp in spec.mlps)
    scaling = config.get("llama_4_scaling")
    rise = Temperature(scaling["beta"], scaling["original_max_position_embeddings"]) if scaling else None
    return replace(
        spec,
        mixers=tuple(replace(mixer, temperature=rise or mixer.temperature) for mixer in latents(spec)),
        mlps=tuple(mlps),
        names=NAMES["mistral_large3"],
    )


def youtu(config: HfConfig) -> DecoderSpec:
    """Youtu-LLM: the attention of DeepSeek-V3, without experts."""
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu"))
    return deepseek({"tie_word_embeddings": True, **config}, mlp)


def minicpm3(config: HfConfig) -> DecoderSpec:
    """MiniCPM3: DeepSeek's attention, without experts, in MiniCPM's parametrization."""
    hidden = config["hidden_size"]
    value_dim = config.get("v_head_dim") or hidden // config["num_attention_heads"]
    own = {"v_head_dim": value_dim, "rope_interleave": False}
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu"), bias=bool(config.get("mlp_bias")))
    spec = deepseek({"tie_word_embeddings": True, "rms_norm_eps": 1e-5, **config, **own}, mlp)
    depth = config.get("scale_depth", 1.4)
    return replace(
        spec,
        embedding_scale=config.get("scale_emb", 12),
        residual_scale=depth / spec.num_layers**0.5 if depth else None,
        logit_scale=(config.get("dim_model_base") or hidden) / hidden,
    )


def solar_open(config: HfConfig) -> DecoderSpec:
    """Solar Open: standard attention, and the experts of DeepSeek-V3 in every layer."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "intermediate_size": 0, **config}
    attention = {"qkv_bias": bool(config.get("attention_bias", False))}
    return decoder_spec(config, attention=attention, mlp=mixtures(config, is_v3=True), names=NAMES["deepseek_moe"])


def dots1(config: HfConfig) -> DecoderSpec:
    """dots.llm1: standard attention, with norms of queries and keys, and the experts of DeepSeek-V3."""
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    first = config.get("max_window_layers", 62)
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm}
    return decoder_spec(
        config,
        attention=attention,
        mlp=mixtures({"norm_topk_prob": False, **config}, is_v3=True),
        names=NAMES["deepseek_moe"],
        windows=layer_windows(config, lambda i: i >= first),
    )


def mixtures(config: HfConfig, is_v3: bool) -> tuple[MLPSpec | MoESpec, ...]:
    """Return the MLP of each layer. The first layers are dense."""
    act = config.get("hidden_act", "silu")
    size = config["moe_intermediate_size"]
    grouped = is_v3 or config.get("topk_method", "greedy") == "group_limited_greedy"
    shared = MLPSpec(size * config["n_shared_experts"], act) if config.get("n_shared_experts") else None
    experts = MoESpec(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        size,
        act,
        scoring="sigmoid" if is_v3 else "softmax",
        normalize=bool(config.get("norm_topk_prob", is_v3)),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=(config.get("n_group") or 1) if grouped else 1,
        topk_groups=config.get("topk_group") or 1,
        group_score="two_best" if is_v3 else "best",
        correction_bias=is_v3,
        shared=shared,
    )
    dense = MLPSpec(config["intermediate_size"], act)
    first = config.get("first_k_dense_replace", 0)
    every = config.get("moe_layer_freq", 1)  # a list in MiMo-V2, which has mlp_layer_types
    layers = config["num_hidden_layers"]
    kinds = config.get("mlp_layer_types")
    sparse = [k == "sparse" for k in kinds] if kinds else [i >= first and i % every == 0 for i in range(layers)]
    return tuple(experts if is_sparse else dense for is_sparse in sparse)


def with_draft_layers(config: HfConfig) -> tuple[str, ...]:
    """Return `DecoderSpec.ignored` for a checkpoint whose last layers predict further tokens (read by heads/mtp.py)."""
    layers = config["num_hidden_layers"]
    drafting = range(layers, layers + (config.get("num_nextn_predict_layers") or 1))
    return (r"rotary_emb\.inv_freq$", rf"^model\.layers\.({'|'.join(map(str, drafting))})\.")
