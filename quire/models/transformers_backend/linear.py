"""Quire's linear layers in place of those of transformers' code: with packed or quantized weights, adapters, and split
over tensor-parallel ranks by the model's own plan."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from quire.checkpoints.formats.at_load import quantizer_of
from quire.layers.build import Builder, WeightSlot
from quire.layers.linear import ColumnParallelLinear, DenseWeight, LinearMethod, Quantizer, RowParallelLinear
from quire.layers.lora import AdapterSlots
from quire.layers.specs import OutputPart
from quire.models.transformers_backend.attention import Step
from quire.models.transformers_backend.quantized import QuantizedTensors
from quire.ops import Kernels
from quire.parallel.mesh import Communicator

Inner = ColumnParallelLinear | RowParallelLinear

# Small layers whose errors would change which experts are used, by the last part of their names
_ROUTERS = {"gate", "router", "shared_expert_gate", "classifier", "wg"}


class Linear(nn.Module):
    """Has the interface of torch's Linear. group: sums the outputs of the ranks; None if each rank has its own."""

    def __init__(self, inner: Inner, step: Step, replaced: nn.Linear, group: Communicator | None) -> None:
        super().__init__()
        self.inner = inner
        self.step = step
        self.group = group
        self.in_features = replaced.in_features  # of the whole layer
        self.out_features = replaced.out_features

    @property
    def weight(self) -> Tensor:
        """This rank's dense weight, [out, in], for code that multiplies by it without calling the layer."""
        return self.inner.weight.dense()

    @property
    def bias(self) -> Tensor | None:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        rows = x.reshape(-1, x.shape[-1])
        slots = self.step.slots
        if slots is not None and len(slots) != len(rows):
            raise ValueError(f"a layer with adapters reads {len(rows)} rows in a step of {len(slots)} tokens")
        out = self.inner(rows, slots)
        if self.group is not None:
            out = self.group.all_reduce(out)
        return out.view(*x.shape[:-1], out.shape[-1])


class LinearLayers:
    """Replaces the linear layers of a network. layers: the new ones, by name. num_parameters: of the whole layers."""

    def __init__(
        self,
        kernels: Kernels,
        group: Communicator,
        step: Step,
        quantization: str | None,
        adapters: AdapterSlots | None,
        stored: QuantizedTensors | None = None,
    ) -> None:
        """quantization: the value of --quantization, None to keep the weights as they are. stored: of a quantized
        checkpoint."""
        self.layers: dict[str, Inner] = {}
        self.num_parameters = 0
        self._step = step
        self._group = group
        self._quantization = quantization
        self._stored = stored
        method_of: Callable[[str], LinearMethod] = (lambda name: DenseWeight) if stored is None else stored.method_of
        self._builder = Builder(kernels, group, method_of, self._quantizer, adapters)
        self._without_adapters = Builder(kernels, group, method_of, self._quantizer)
        self._quantizer_of: Callable[[str], Quantizer | None] = lambda name: None

    def _quantizer(self, name: str) -> Quantizer | None:
        return None if name.rpartition(".")[2] in _ROUTERS else self._quantizer_of(name)

    def replace(self, network: Any) -> None:
        """Replace torch's linear layers, one after the other, so that memory holds only one of them twice. An output
        layer that is also the embedding table is left as it is, unless it is quantized.

        Raises ValueError if the ranks cannot divide a layer.
        """
        head = network.get_output_embeddings()
        table = network.get_input_embeddings()
        head_name = next((name for name, module in network.named_modules() if module is head), None)
        self._quantizer_of = quantizer_of(self._quantization, {"lm_head": head_name})
        plan = _plan(network, self._group.size) if self._group.size > 1 else {}
        for name, module in list(network.named_modules()):
            is_table = module is head and table is not None and module.weight is table.weight
            if type(module) is not nn.Linear or (is_table and self._quantization is None):
                continue
            parent, _, attribute = name.rpartition(".")
            setattr(network.get_submodule(parent), attribute, self._replaced(name, module, _style(name, plan)))

    def drop_others(self, network: Any) -> None:
        """Forget the layers that are no longer part of the network, since other pipeline stages have them. Adapters may
        still name them."""
        own = {id(module.inner) for module in network.modules() if isinstance(module, Linear)}
        others = {name: layer for name, layer in self.layers.items() if id(layer) not in own}
        self.layers = {name: layer for name, layer in self.layers.items() if name not in others}
        if (adapters := self._builder.adapters) is not None:
            dropped = {id(layer.adapters) for layer in others.values()}
            adapters.products = [product for product in adapters.products if id(product) not in dropped]
            adapters.note_elsewhere(f"{name}.weight" for name in others)

    def _replaced(self, name: str, module: nn.Linear, style: str) -> Linear:
        has_adapters = ".experts." not in name  # an expert reads only some of the tokens
        builder = self._builder if has_adapters else self._without_adapters
        rows, columns = module.weight.shape
        has_bias = module.bias is not None
        inner: Inner
        if style == "rowwise":
            inner = RowParallelLinear(builder, name, columns, self._share(name, columns), rows, has_bias)
        else:
            pieces = {"colwise": 1, "packed_colwise": 2}.get(style)
            parts = [OutputPart(name, rows, 0, rows)] if pieces is None else self._parts(name, rows, pieces)
            inner = ColumnParallelLinear(builder, columns, parts, has_bias)
        values = {f"{name}.weight": module.weight.detach()}
        if has_bias:
            values[f"{name}.bias"] = module.bias.detach()

        stored = self._stored
        is_quantized = stored is not None and stored.has(f"{name}.weight")

        def fill(slot: WeightSlot) -> None:
            if is_quantized and stored is not None:
                stored.checkpoint.copy_into(slot)
            else:
                slot.target.copy_(values[slot.name][slot.pick])

        builder.fill(fill)
        self.layers[name] = inner
        self.num_parameters += sum(value.numel() for value in values.values())
        return Linear(inner, self._step, module, self._group if style == "rowwise" else None)

    def _share(self, name: str, size: int) -> tuple[int, int]:
        if size % self._group.size:
            raise ValueError(f"tensor_parallel_size={self._group.size} does not divide the {size} elements of {name}")
        return self._group.share(size)

    def _parts(self, name: str, rows: int, pieces: int) -> list[OutputPart]:
        size = rows // pieces
        start, stop = self._share(name, size)
        return [OutputPart(name, rows, i * size + start, i * size + stop) for i in range(pieces)]


def _plan(network: Any, ranks: int) -> Mapping[str, str]:
    """Return the styles of the layers by patterns of their names. Raises ValueError for a model without a plan, or
    whose heads the ranks cannot divide."""
    config = network.base_model.config
    plan = config.base_model_tp_plan
    if not plan:
        raise ValueError("it has no plan for tensor parallelism (base_model_tp_plan)")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None)) and heads % ranks:
            raise ValueError(f"tensor_parallel_size={ranks} does not divide {name}={heads}")
    prefix = "" if network.base_model is network else f"{network.base_model_prefix}."
    return {f"{prefix}{pattern}": style for pattern, style in plan.items()}


def _style(name: str, plan: Mapping[str, str]) -> str:
    """Return the plan's style of a layer. Every rank has the whole of a layer without one. Layers whose outputs would
    be gathered, or whose inputs are whole, are also whole on every rank."""
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    style = plan.get(pattern, plan.get(name, "replicate"))
    return style if style in ("colwise", "rowwise", "packed_colwise") else "replicate"
