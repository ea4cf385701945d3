"""What torch.compile does not trace."""

import copy
from typing import TypeVar

import torch

T = TypeVar("T")


def hidden(thing: T, *methods: str) -> T:
    """A copy of an object, those of whose methods that have these names run outside of what torch.compile makes: their
    kernels are compiled already."""
    made = copy.copy(thing)
    for name in methods:
        if hasattr(made, name):
            setattr(made, name, torch.compiler.disable(getattr(made, name)))  # type: ignore[no-untyped-call]
    return made
