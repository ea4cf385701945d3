"""HRM-Text, a hierarchical reasoning model: two stacks of layers, through which each token goes several times."""

from quire.layers.specs import CycleSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec

_MOST_LAYERS = 10_000
_STACK = "model.{stack}_module"


def hrm_text(config: HfConfig) -> DecoderSpec:
    """Norms have no weights, and attention has gates. num_hidden_layers may count all runs through a stack."""
    config = {"H_cycles": 2, "L_cycles": 3, "rms_norm_eps": 1e-6, "initializer_range": 0.02, **config}
    per_stack = config.get("num_layers_per_stack") or config["num_hidden_layers"]
    cycles = CycleSpec(per_stack, config["L_cycles"])
    total = per_stack * config["H_cycles"] * (cycles.low + 1)
    if total > _MOST_LAYERS:
        raise ValueError(f"H_cycles and L_cycles make {total:,} layers of {per_stack}, more than {_MOST_LAYERS:,}")
    if config.get("attention_bias"):
        raise ValueError("an HRM-Text whose attention has biases is not supported")
    names = {role: name and name.replace("model", _STACK, 1) for role, name in NAMES["llama"].items()}
    names |= NAMES["hrm"]

    def names_of(layer: int) -> dict[str, str | None]:
        stack = "H" if cycles.place(layer)[2] else "L"
        return {role: name.replace("{stack}", stack) for role, name in names.items() if name and "{i}" in name}

    config = {**config, "num_hidden_layers": total, "num_key_value_heads": config["num_attention_heads"]}
    return decoder_spec(
        config,
        attention={"output_gate": "separate", "qkv_layout": "gate_first"},
        norm=NormSpec("rms", config["rms_norm_eps"], affine=False),
        embedding_scale=config.get("embedding_scale") or 1 / config["initializer_range"],
        residual="cycle",
        cycles=cycles,
        weights_of=tuple(layer % per_stack for layer in range(total)),
        names={"embedding": NAMES["llama"]["embedding"], "final_norm": None, "first_low": "model.z_L_init"},
        layer_names={layer: names_of(layer) for layer in range(total)},
    )
