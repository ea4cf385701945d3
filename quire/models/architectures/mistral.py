"""Mistral: Llama with a sliding window in every layer (the first 7B; later ones have none)."""

from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def mistral(config: HfConfig) -> DecoderSpec:
    window = config.get("sliding_window", 4096)  # the default of a config that does not say
    return decoder_spec(config, windows=(window,) * config["num_hidden_layers"])
