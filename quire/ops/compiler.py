"""Excludes methods from torch.compile."""

import copy
from typing import TypeVar

import torch

T = TypeVar("T")


def hidden(thing: T, *methods: str) -> T:
    """Return a copy of an object in which the methods with these names, if it has them, are excluded from
    torch.compile, since they call compiled kernels."""
    made = copy.copy(thing)
    for name in methods:
        if hasattr(made, name):
            setattr(made, name, torch.compiler.disable(getattr(made, name)))  # type: ignore[no-untyped-call]
    return made
