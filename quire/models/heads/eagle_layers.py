"""The common base of all EAGLE heads: the layers of a Llama, without the norm before the first one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from quire.layers.attention_spec import AttentionSpec
from quire.layers.build import Builder
from quire.layers.specs import MLPSpec, NormSpec
from quire.models.decoder import LayerStack
from quire.models.spec import NAMES, HfConfig, Names, decoder_spec, layer_windows


class EagleLayers(LayerStack):
    """The base of the heads.

    inputs: width of the input of the first layer's attention. prefix: of the layers' tensors, with {i} for the layer.
    The checkpoint's tensors decide which biases and which norms of queries and keys the layers have, because fields
    such as `bias` have different meanings in different configs.
    """

    taps: Sequence[int] = ()
    token_ids: Tensor | None = None
    mask: tuple[int, Tensor] | None = None
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)

    def __init__(
        self,
        builder: Builder,
        config: HfConfig,
        has: Callable[[str], bool],
        max_model_len: int,
        inputs: int,
        prefix: str = "layers.{i}.",
    ) -> None:
        def has_part(name: str) -> bool:
            return has(prefix.replace("{i}", "0") + name)

        names: Names = {
            role: name and name.replace("model.layers.{i}.", prefix) for role, name in NAMES["llama"].items()
        }
        norm = NormSpec("rms", config["rms_norm_eps"])
        attention = {
            "qkv_bias": has_part("self_attn.q_proj.bias"),
            "output_bias": has_part("self_attn.o_proj.bias"),
            "qk_norm": norm if has_part("self_attn.q_norm.weight") else None,
        }
        activation = config.get("hidden_act", "silu")
        mlp_bias = has_part("mlp.gate_proj.bias")
        mlp = MLPSpec(config["intermediate_size"], activation, bias=mlp_bias)
        windows = layer_windows(config, lambda i: False)[: config["num_hidden_layers"]]
        spec = decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=names, windows=windows)
        first, *others = spec.mixers
        assert isinstance(first, AttentionSpec)
        mixers = (replace(first, input_size=inputs), *others)
        super().__init__(builder, replace(spec, mixers=mixers, first_norm=False), max_model_len)
