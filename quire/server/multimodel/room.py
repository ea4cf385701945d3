"""Which models must be unloaded to make room for another one."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.server.errors import ApiError
from quire.server.multimodel.memory import gib
from quire.server.multimodel.served_model import ServedModel, Status


@dataclass(frozen=True)
class Room:
    """free: bytes without a model's reservation. victims: the models to unload. is_enough: whether the new model fits
    right now; if it does not, and there are no victims, other models are being loaded or unloaded."""

    free: int
    victims: Sequence[ServedModel] = ()
    is_enough: bool = False


def room_for(model: ServedModel, others: Sequence[ServedModel], memory: int, most: int | None) -> Room:
    """others: the models with a reservation. memory: bytes for all models. most: the maximum number of loaded models.

    Victims are idle models first, then those that are closing already, each in the order of their last use. Raises
    ApiError if the model cannot fit beside the pinned ones.
    """
    assert model.need is not None
    needed = model.need.least
    pinned = [other for other in others if other.is_pinned]
    _check_possible(model, pinned, memory, most)
    free = memory - sum(other.memory for other in others)
    places = None if most is None else most - len(others)
    if needed <= free and (places is None or places > 0):
        return Room(free, is_enough=True)
    candidates = sorted(
        (other for other in others if other.status is Status.LOADED and not other.is_pinned),
        key=lambda other: (not other.is_idle, not other.is_closing, other.last_used),
    )
    victims: list[ServedModel] = []
    missing = needed - free
    for candidate in candidates:
        if missing <= 0 and (places is None or places + len(victims) > 0):
            break
        victims.append(candidate)
        missing -= candidate.memory
    if places is None:  # a large model among them may make the small ones before it unnecessary
        for victim in [*victims]:
            if missing + victim.memory <= 0:
                victims.remove(victim)
                missing += victim.memory
    return Room(free, victims)


def _check_possible(model: ServedModel, pinned: Sequence[ServedModel], memory: int, most: int | None) -> None:
    assert model.need is not None
    reserved = sum(other.memory for other in pinned)
    if model.need.least <= memory - reserved and (most is None or len(pinned) < most):
        return
    beside = ", ".join(f"{other.name} with {gib(other.memory)}" for other in pinned)
    message = f"the model {model.name!r} needs {model.need}, but models may use {gib(memory)} in total"
    if beside:
        message += f", of which pinned ones keep {gib(reserved)}: {beside}"
    if most is not None and len(pinned) >= most:
        message = f"the model {model.name!r} cannot be loaded: all {most} places are taken by pinned models: {beside}"
    raise ApiError(507, message, param="model", code="insufficient_memory")
