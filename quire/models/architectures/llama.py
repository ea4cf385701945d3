"""Llama 1 to 3.x and the checkpoints that call themselves Llama."""

from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def llama(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
