"""Ranges for Nsight Systems (NVTX): the stages of each step, and each layer that is called from Python."""

from collections.abc import Callable
from typing import Any

from quire.observability.profiling.watched_calls import core_calls, mark, rank_calls

DOMAIN = "quire"  # the domain under which Nsight shows the ranges


def _range(name: str) -> Any:
    import nvtx

    return nvtx.annotate(name, domain=DOMAIN)


def mark_core(scheduler: Any) -> None:
    """Mark the stages of a core from now on."""
    mark(core_calls(scheduler), _range)


def mark_rank(runner: Any, compiled: bool) -> None:
    """Mark the stages of a rank. compiled: whether torch.compile fuses the layers, so that none can be marked."""
    mark(rank_calls(runner, lambda step: "step"), _range)  # a constant name, since NVTX stores each name
    model = runner.model
    for number, layer in enumerate(() if compiled else getattr(model, "layers", ()), getattr(model, "first_layer", 0)):
        kind = type(layer)
        # Python looks up __call__ in the class. Name and __module__ stay the same, so the layer's type remains
        # recognizable.
        layer.__class__ = type(
            kind.__name__,
            (kind,),
            {"__call__": _marked(f"layer {number}", kind.__call__), "__module__": kind.__module__},
        )


def _marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*arguments: Any, **options: Any) -> Any:
        with _range(name):
            return call(*arguments, **options)

    return marked
