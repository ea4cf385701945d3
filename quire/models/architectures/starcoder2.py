"""StarCoder2: Llama with layer norms, biases, and an MLP without a gate. docs/add-an-architecture.md explains it."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec, layer_windows


def starcoder2(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("use_bias", True))
    act = config.get("hidden_act", "gelu_pytorch_tanh")
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias},
        mlp=MLPSpec(config["intermediate_size"], act, gated=False, bias=bias),
        norm=NormSpec("layer", config.get("norm_epsilon", 1e-5), bias=True),
        names={"gate": None, "up": "model.layers.{i}.mlp.c_fc", "down": "model.layers.{i}.mlp.c_proj"},
        windows=layer_windows(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
