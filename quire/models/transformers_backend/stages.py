"""Cuts a model of transformers into the stages of a pipeline, by the model's own plan (base_model_pp_plan)."""

from typing import Any

import torch
from torch import Tensor, nn

from quire.config.engine import ParallelConfig
from quire.models.transformers_backend.probe import LayerAttention
from quire.parallel.pipeline import Stage
from quire.parallel.sizes import balanced_parts

_TOKENS = 4


class _Passed(nn.Module):
    """Stands for a layer of another stage. Layers keep their numbers, since configs describe layers by number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():  # a model's loop may read them, such as a layer's attention type
            if isinstance(value, str | int | float) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *others: Any, **options: Any) -> Tensor:
        return hidden_states


def choose_stage(count: int, options: ParallelConfig, number: int) -> Stage:
    """Return the stage of this number, of a model with `count` equal layers. Raises ValueError."""
    stages = options.pipeline_parallel_size
    counts = options.pipeline_layers
    if counts and (sum(counts) != count or min(counts) < 1):
        message = f"pipeline_layers must add up to the model's {count} layers, with at least one for each stage"
        raise ValueError(f"{message}, got {counts}")
    counts = counts or balanced_parts([range(i, i + 1) for i in range(count)], [1] * count, stages)
    start = sum(counts[:number])
    return Stage(range(start, start + counts[number]), number == 0, number == stages - 1)


@torch.inference_mode()
def cut(body: Any, layers: list[LayerAttention], stage: Stage) -> None:
    """Keep only a stage's layers of a model without its head, and the final norm in the last stage.

    Raises ValueError if the model cannot be cut, because it changes the stream outside of its layers, for example.
    """
    plan = getattr(body.config, "base_model_pp_plan", None) or {}
    parts = [name for name in plan if isinstance(getattr(body, name, None), nn.ModuleList)]
    if len(parts) != 1 or len(getattr(body, parts[0])) != len(layers):
        raise ValueError(
            "it has no plan for pipeline parallelism (base_model_pp_plan) with one attention in each layer"
        )
    modules = getattr(body, parts[0])
    own = list(modules)
    behind = list(plan)[list(plan).index(parts[0]) + 1 :]
    last = {name: getattr(body, name) for name in behind}
    for index, layer in enumerate(own):
        modules[index] = _Passed(layer)
    for name in behind:
        setattr(body, name, nn.Identity())
    size = body.config.hidden_size
    weight = body.get_input_embeddings().weight
    stream = torch.randn(1, _TOKENS, size, generator=torch.Generator().manual_seed(0)).to(weight)
    positions = torch.arange(_TOKENS, device=weight.device)[None]
    out = body(inputs_embeds=stream, position_ids=positions, use_cache=False)[0]
    if out.shape != stream.shape or not torch.equal(out, stream):
        raise ValueError("it changes hidden states outside of its layers, so it cannot be cut into stages")
    for index in stage.layers:
        modules[index] = own[index]
    if stage.has_head:
        for name, module in last.items():
            setattr(body, name, module)
