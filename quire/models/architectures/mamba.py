"""State-space models, and their hybrids with attention: Mamba, Falcon Mamba, Jamba, Mamba-2, Bamba, Granite 4,
Nemotron-H, Falcon-H1 and Zamba2."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import HybridSpec, Mamba2Spec, MambaSpec, SharedBlockSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def mamba(config: HfConfig) -> DecoderSpec:
    """Mamba and Falcon Mamba: layers with one branch, without attention. Falcon's have inner norms without weights."""
    hidden = config["hidden_size"]
    names = NAMES["mamba2"] | NAMES["mamba"]
    is_falcon = "mixer_rms_eps" in config
    if is_falcon or config["architectures"][0] == "FalconMambaForCausalLM":
        names = names | {role: role for role in ("dt_norm", "b_norm", "c_norm")}
    inner = config.get("intermediate_size") or config.get("expand", 2) * hidden
    rank = config.get("time_step_rank", "auto")
    mixer = MambaSpec(
        hidden,
        inner,
        1,
        config.get("state_size", 16),
        1,
        config.get("conv_kernel", 4),
        NormSpec("rms", config.get("mixer_rms_eps", 1e-6), affine=False),
        -(-hidden // 16) if rank == "auto" else rank,
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
    )
    config = {"num_attention_heads": 1, "max_position_embeddings": 1 << 20, "tie_word_embeddings": True, **config}
    return decoder_spec(
        config,
        mixer=mixer,
        mlp=(None,) * config["num_hidden_layers"],
        rotary=None,
        residual="single",
        names=names,
        norm=NormSpec("rms", config.get("layer_norm_epsilon", 1e-5)),
    )


def jamba(config: HfConfig) -> DecoderSpec:
    """Jamba: Mamba with inner norms. Every eighth layer has attention without positions, every second one experts."""
    hidden = config["hidden_size"]
    rank = config.get("mamba_dt_rank", "auto")
    act = config.get("hidden_act", "silu")
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    state_space = MambaSpec(
        hidden,
        config.get("mamba_expand", 2) * hidden,
        1,
        config.get("mamba_d_state", 16),
        1,
        config.get("mamba_d_conv", 4),
        norm,
        -(-hidden // 16) if rank == "auto" else rank,
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
    )
    count = expert_count(config)
    size = config["intermediate_size"]
    dense = MLPSpec(size, act)
    experts = MoESpec(count, config["num_experts_per_tok"], size, act, normalize=False)

    def periodic(kind: str, period: int, offset: int) -> list[bool]:
        every = config.get(f"{kind}_layer_period", period)
        first = config.get(f"{kind}_layer_offset", offset)
        return [i % every == first for i in range(config["num_hidden_layers"])]

    mlps = tuple(experts if has and count > 1 else dense for has in periodic("expert", 2, 1))
    spec = decoder_spec(config, mlp=mlps, norm=norm, rotary=None, names=NAMES["bamba"] | NAMES["jamba"])
    pairs = zip(spec.mixers, periodic("attn", 8, 4), strict=True)
    return replace(spec, mixers=tuple(mixer if attends else state_space for mixer, attends in pairs))


def mamba2(config: HfConfig) -> DecoderSpec:
    """Mamba-2: layers with one branch, without attention."""
    heads = config["num_heads"]
    head_dim = config["head_dim"]
    mixer = Mamba2Spec(
        config["hidden_size"],
        heads,
        config.get("n_groups", 8),
        config["state_size"],
        head_dim,
        config.get("conv_kernel", 4),
        norm := NormSpec("rms", config.get("layer_norm_epsilon", 1e-5)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
        time_step=_limits(config.get("time_step_limit")),
    )
    config = {"num_attention_heads": heads, "head_dim": head_dim, "max_position_embeddings": 1 << 20, **config}
    return decoder_spec(
        config,
        mixer=mixer,
        mlp=(None,) * config["num_hidden_layers"],
        norm=norm,
        rotary=None,
        residual="single",
        names=NAMES["mamba2"],
    )


def _limits(time_step: Any) -> tuple[float, float]:
    """Return the limits of the time step. transformers writes infinity as a number, a string or an object."""
    if time_step is None:
        return 0.0, float("inf")
    least, most = (float("inf") if isinstance(limit, dict) else float(limit) for limit in time_step)
    return least, most


def _mixer(config: HfConfig, norm: NormSpec, prefix: str = "mamba_", **differences: Any) -> Mamba2Spec:
    """Return the state-space layer of a hybrid, from the fields that Bamba introduced."""
    inner = config[f"{prefix}expand"] * config["hidden_size"]
    heads = config[f"{prefix}n_heads"]
    head_dim = config.get(f"{prefix}d_head", "auto")
    fields: dict[str, Any] = {
        "conv_bias": bool(config.get(f"{prefix}conv_bias", True)),
        "bias": bool(config.get(f"{prefix}proj_bias", False)),
        "time_step": _limits(config.get("time_step_limit")),
    }
    return Mamba2Spec(
        config["hidden_size"],
        heads,
        config[f"{prefix}n_groups"],
        config[f"{prefix}d_state"],
        inner // heads if head_dim == "auto" else head_dim,
        config.get(f"{prefix}d_conv", 4),
        norm,
        **{**fields, **differences},
    )


def bamba(config: HfConfig) -> DecoderSpec:
    """Bamba: some layers have attention, with half of each head rotated."""
    config = {"partial_rotary_factor": 0.5, **config}
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    bias = bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias}
    mlp = MLPSpec(
        config["intermediate_size"], config.get("hidden_act", "silu"), bias=bool(config.get("mlp_bias", False))
    )
    spec = decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=NAMES["bamba"])
    layers = config.get("attn_layer_indices") or ()
    state_space = _mixer(config, norm)
    return replace(spec, mixers=tuple(m if i in layers else state_space for i, m in enumerate(spec.mixers)))


def granite_hybrid(config: HfConfig) -> DecoderSpec:
    """Granite 4: few attention layers, mostly without positions, and Granite's multipliers. A shared expert is used in
    addition to the routed ones, or alone."""
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    act = config.get("hidden_act", "silu")
    bias = bool(config.get("attention_bias", False))
    count = config.get("num_local_experts") or 0
    shared = MLPSpec(config["shared_intermediate_size"], act)
    experts = MoESpec(
        count,
        config.get("num_experts_per_tok") or 0,
        config.get("intermediate_size") or 0,
        act,
        shared=shared,
        layout="stacked",
    )
    spec = decoder_spec(
        config,
        mlp=experts if count else shared,
        norm=norm,
        names=NAMES["bamba"] | NAMES["granite_hybrid"],
        attention={"qkv_bias": bias, "output_bias": bias, "scale": config.get("attention_multiplier", 1.0)},
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1 / config.get("logits_scaling", 1.0),
        rotary="default" if config.get("position_embedding_type") == "rope" else None,
    )
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * spec.num_layers
    return replace(
        spec,
        mixers=tuple(
            attention if kind in ("attention", "full_attention") else _mixer(config, norm)
            for attention, kind in zip(spec.mixers, kinds, strict=True)
        ),
    )


_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
_SAME = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers' names


def nemotron_h(config: HfConfig) -> DecoderSpec:
    """Nemotron-H: each layer is a state-space layer, attention without positions, or an MLP; in Nemotron 3, experts
    without gates take the place of MLPs. In NemotronH-Puzzle, layers may differ from the config's sizes."""
    config = {"layer_norm_epsilon": 1e-5, "head_dim": 128, "mlp_hidden_act": "relu2", **config}
    blocks = config.get("block_configs")
    pattern = config.get("hybrid_override_pattern")
    if blocks:
        kinds = [block["block_type"] for block in blocks]
    else:
        kinds = [_KINDS[c] for c in pattern] if pattern else config.get("layers_block_type") or config["layer_types"]
    kinds = [_SAME.get(kind, kind) for kind in kinds]
    if unknown := set(kinds) - {"mamba", "attention", "mlp", "moe"}:
        raise ValueError(f"Nemotron-H with layers of the kind {unknown.pop()!r} is not supported")
    norm = NormSpec("rms", config["layer_norm_epsilon"])
    layers = [(kind, {**config, **(blocks[i] if blocks else {})}) for i, kind in enumerate(kinds)]
    return decoder_spec(
        {"intermediate_size": 0, **config, "num_hidden_layers": len(kinds)},
        mixer=tuple(_nemotron_mixer(kind, fields, norm) for kind, fields in layers),
        mlp=tuple(_nemotron_mlp(kind, fields) for kind, fields in layers),
        norm=norm,
        rotary=None,
        residual="single",
        names=NAMES["mamba2"] | NAMES["nemotron_h"],
        ignored=(r"rotary_emb\.inv_freq$", r"^medusa_head\.", r"^mtp\."),
    )


def _nemotron_mixer(kind: str, config: HfConfig, norm: NormSpec) -> AttentionSpec | Mamba2Spec | None:
    hidden = config["hidden_size"]
    if kind == "attention":
        bias = bool(config.get("attention_bias", False))
        heads = config["num_attention_heads"]
        return AttentionSpec(hidden, heads, config.get("num_key_value_heads") or heads, config["head_dim"], bias, bias)
    if kind != "mamba":
        return None
    return Mamba2Spec(
        hidden,
        config["mamba_num_heads"],
        config["n_groups"],
        config["ssm_state_size"],
        config["mamba_head_dim"],
        config.get("conv_kernel", 4),
        norm,
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        time_step=(config.get("time_step_min", config.get("mamba_dt_min", 0.001)), float("inf")),
    )


def _nemotron_mlp(kind: str, config: HfConfig) -> MLPSpec | MoESpec | None:
    if kind == "moe":
        return _nemotron_experts(config)
    if kind != "mlp":
        return None
    bias = bool(config.get("mlp_bias", False))
    return MLPSpec(config["intermediate_size"], config["mlp_hidden_act"], gated=False, bias=bias)


def _nemotron_experts(config: HfConfig) -> MoESpec:
    act = config["mlp_hidden_act"]
    size = config["moe_shared_expert_intermediate_size"]
    if config.get("mlp_bias"):
        raise ValueError("a Nemotron 3 whose experts have biases is not supported")
    return MoESpec(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        act,
        scoring="sigmoid",
        normalize=bool(config.get("norm_topk_prob", True)),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1,
        topk_groups=config.get("topk_group") or 1,
        group_score="two_best",
        correction_bias=True,
        shared=MLPSpec(size, act, gated=False),
        gated=False,
        latent_size=config.get("moe_latent_size") or 0,
    )


def falcon_h1(config: HfConfig) -> DecoderSpec:
    """Falcon-H1: every layer has attention and a state-space layer side by side, and multipliers nearly everywhere."""
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    bias = bool(config.get("attention_bias", False))
    of_gate, of_down = config.get("mlp_multipliers") or (1.0, 1.0)
    mlp = MLPSpec(
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        bias=bool(config.get("mlp_bias", False)),
        multipliers=(of_gate, of_down),
    )
    spec = decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias},
        mlp=mlp,
        norm=norm,
        names={**NAMES["bamba"]},
        embedding_scale=config.get("embedding_multiplier", 1.0),
        logit_scale=config.get("lm_head_multiplier", 1.0),
    )
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    state_space = _mixer(
        {**config, "mamba_d_head": inner // config["mamba_n_heads"]},
        norm,
        has_norm=bool(config.get("mamba_rms_norm", False)),
        gate_first=not config.get("mamba_norm_before_gate", True),
        multipliers=tuple(config.get("ssm_multipliers") or (1.0,) * 5),
    )
    attention = spec.mixers[0]
    assert isinstance(attention, AttentionSpec)
    hybrid = HybridSpec(  # the key multiplier scales the scores
        replace(attention, scale=attention.head_dim**-0.5 * config.get("key_multiplier", 1.0)),
        state_space,
        (config.get("attention_in_multiplier", 1.0), config.get("attention_out_multiplier", 1.0)),
        (config.get("ssm_in_multiplier", 1.0), config.get("ssm_out_multiplier", 1.0)),
    )
    return replace(spec, mixers=(hybrid,) * spec.num_layers)


def zamba2(config: HfConfig) -> DecoderSpec:
    """Zamba2: Mamba-2 in every layer; some layers first use a block of attention and an MLP, which they share. Only
    the first layer that uses a block has its weights in the checkpoint; adapters are counted over all these layers."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    config = {"rms_norm_eps": 1e-5, "mamba_d_conv": 4, "tie_word_embeddings": True, **config}
    kinds = config.get("layers_block_type") or config["layer_types"]
    users = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    blocks = config.get("num_mem_blocks") or 1
    bias = bool(config.get("add_bias_linear", False))
    head_dim = config.get("attention_head_dim") or 2 * hidden // heads
    state_heads = config["n_mamba_heads"]
    state_space = Mamba2Spec(
        hidden,
        state_heads,
        config.get("mamba_ngroups") or 1,
        config["mamba_d_state"],
        config.get("mamba_expand", 2) * hidden // state_heads,
        config["mamba_d_conv"],
        NormSpec("rms", 1e-5),
        bias=bias,
        time_step=(config.get("time_step_min", 0.001), float("inf")),
    )
    rank = config.get("adapter_rank") or 128
    kv_heads = config.get("num_key_value_heads") or heads
    scale = (head_dim / 2) ** -0.5
    shared = SharedBlockSpec(
        AttentionSpec(hidden, heads, kv_heads, head_dim, scale=scale, input_size=2 * hidden),
        MLPSpec(config.get("intermediate_size") or 4 * hidden, config.get("hidden_act", "gelu"), bias=bias),
        state_space,
        rank if config.get("use_shared_attention_adapter") else 0,
        rank,
    )
    names_of = {
        layer: {
            role: name and name.replace("{b}", str(users[number % blocks])).replace("{a}", str(number))
            for role, name in NAMES["zamba2_block"].items()
        }
        for number, layer in enumerate(users)
    }
    return decoder_spec(
        {**config, "head_dim": head_dim},
        mixer=tuple(shared if kind == "hybrid" else state_space for kind in kinds),
        mlp=(None,) * len(kinds),
        norm=NormSpec("rms", config["rms_norm_eps"]),
        rotary="default" if config.get("use_mem_rope") else None,
        residual="blocks",
        names=NAMES["bamba"] | {"mlp_norm": None},
        layer_names=names_of,
        ignored=(r"\.shared_transformer\.",),
    )
