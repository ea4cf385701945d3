"""Solar Pro: Llama with connections that skip layers."""

from dataclasses import replace

from quire.layers.specs import SkipSpec
from quire.models.architectures.llama import llama
from quire.models.spec import DecoderSpec, HfConfig


def solar(config: HfConfig) -> DecoderSpec:
    """The stream before a layer in bskcn_1 is blended into the one before the next layer in bskcn_3; likewise, bskcn_2
    and bskcn_4."""
    starts, ends = ([config[f"bskcn_{i}"] for i in pair] for pair in ((1, 2), (3, 4)))
    weight = config["bskcn_tv"][1]
    skips = []
    for target in range(config["num_hidden_layers"]):
        for sources, targets in zip(starts, ends, strict=True):
            if target in targets:
                skips.append(SkipSpec(max(i for i in sources if i <= target), target, weight))
    bias = config.get("attention_bias") or config.get("bias")
    return replace(llama({**config, "attention_bias": bias}), skips=tuple(skips))
