"""DeciLM and Llama-Nemotron: Llama whose layers differ in their sizes. Some lack attention, an MLP, or both."""

from dataclasses import replace

from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MLPSpec
from quire.models.architectures.llama import llama
from quire.models.spec import DecoderSpec, HfConfig


def deci(config: HfConfig) -> DecoderSpec:
    layers = range(config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    if "block_configs" not in config:
        counts = config["num_key_value_heads_per_layer"]
        blocks = [{"attention": {"n_heads_in_group": heads // n}, "ffn": {}} for n in counts]
    else:
        blocks = config["block_configs"]
    spec = llama({**config, "intermediate_size": config.get("intermediate_size") or 1, "num_key_value_heads": heads})
    mixer = spec.mixers[0]
    assert isinstance(mixer, AttentionSpec)
    mixers = list[AttentionSpec | None]()
    mlps = list[MLPSpec | None]()
    names = dict[int, dict[str, str | None]]()
    for i, block in zip(layers, blocks, strict=True):
        attention = block["attention"]
        mlp = block["ffn"]
        if attention.get("replace_with_linear") or mlp.get("replace_with_linear"):
            raise ValueError("block_configs with replace_with_linear is not supported")
        skips = attention.get("no_op")
        mixers.append(None if skips else replace(mixer, num_kv_heads=heads // attention["n_heads_in_group"]))
        mlps.append(None if mlp.get("no_op") else _deci_mlp(config, mlp))
        if mixers[-1] is None:
            names[i] = {"attention_norm": None if mlps[-1] is None else spec.names["mlp_norm"], "mlp_norm": None}
        elif mlps[-1] is None:
            names[i] = {"mlp_norm": None}
    return replace(spec, mixers=tuple(mixers), mlps=tuple(mlps), layer_names=names)


def _deci_mlp(config: HfConfig, mlp: HfConfig) -> MLPSpec:
    size = mlp.get("intermediate_size") or config.get("intermediate_size") or 0
    if mlp.get("ffn_mult") is not None:
        size = -(-int(2 * mlp["ffn_mult"] * config["hidden_size"] / 3) // 256) * 256
    act = mlp.get("hidden_act") or config.get("hidden_act", "silu")
    return MLPSpec(size, act, bias=bool(config.get("mlp_bias", False)))
