"""Each operation is declared once, as a readable torch function, for which faster implementations are registered.

    @declare
    def rms_norm(x, weight, eps): ...            # the definition, against which the others are tested

    @rms_norm.implementation("cpu", supports=on_cpu)
    def rms_norm_cpu(x, weight, eps): ...

`Kernels` picks the best implementation of every op once, when the engine starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Function = Callable[..., Any]
ANYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class Target:
    """The device and type for which an implementation is chosen.

    batch_invariant: whether a row's result must not depend on the number of rows, nor on the other rows. narrow: in a
    float32 model, the type of keys, values and separate embedding tables, of 16 bits. Products with quantized weights
    may then round their inputs, as in models of 16 bits; in other float32 models, they may not.
    """

    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool = False
    narrow: torch.dtype | None = None


@dataclass(frozen=True)
class Implementation:
    """invariant_on: types of devices on which a row's result depends on that row alone, bit for bit."""

    name: str
    function: Function
    supports: Callable[[Target], bool]
    invariant_on: tuple[str, ...]

    def suits(self, target: Target) -> bool:
        """Return whether this implementation supports the target, and computes rows independently if the target
        requires that."""
        invariant = not target.batch_invariant or target.device.type in self.invariant_on
        return invariant and self.supports(target)


class Op:
    """An operation: its reference, and the registered implementations, the best last."""

    def __init__(self, reference: Function, invariant_on: tuple[str, ...] = ()) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.implementations = [Implementation("reference", reference, lambda target: True, invariant_on)]

    def implementation(
        self, name: str, supports: Callable[[Target], bool], invariant_on: tuple[str, ...] = ANYWHERE
    ) -> Callable[[Function], Function]:
        """Decorator: register a faster implementation. Later registrations are preferred to earlier ones."""

        def register(function: Function) -> Function:
            self.implementations.append(Implementation(name, function, supports, invariant_on))
            return function

        return register

    def choose(self, target: Target, pinned: str | None = None) -> Implementation:
        """Return the last registered implementation that supports `target`, or the one that is pinned by name.

        Raises ValueError if the pinned implementation does not exist or does not support the target, or if the target
        requires batch invariance, which the implementation does not provide.
        """
        where = f"{target.dtype} on {target.device.type}"
        if pinned is None:
            best = next((i for i in reversed(self.implementations) if i.suits(target)), None)
            if best is None:
                raise ValueError(
                    f"batch_invariant: {self.name} has no implementation for {where} whose results do not "
                    "depend on the batch; a CPU needs a C++ compiler, a GPU Triton"
                )
            return best
        for candidate in self.implementations:
            if candidate.name == pinned:
                if not candidate.supports(target):
                    raise ValueError(f"{self.name}: implementation {pinned!r} does not support {target}")
                if not candidate.suits(target):
                    raise ValueError(
                        f"batch_invariant contradicts kernels: for {where}, results of "
                        f"{self.name}={pinned} depend on the batch; leave one of the two out"
                    )
                return candidate
        names = ", ".join(i.name for i in self.implementations)
        raise ValueError(f"{self.name} has no implementation {pinned!r}; it has: {names}")


OPS: dict[str, Op] = {}  # every operation by name; filled when the declaring modules are imported


def declare(reference: Function, invariant_on: tuple[str, ...] = ()) -> Op:
    """Decorator: declare an operation by its reference implementation."""
    return OPS.setdefault(reference.__name__, Op(reference, invariant_on))


def declare_invariant(*devices: str) -> Callable[[Function], Op]:
    """Decorator: like `declare`, for a reference that is batch-invariant on these types of devices, since it computes
    each element separately."""
    return partial(declare, invariant_on=devices)


class Kernels:
    """The implementation of every op for one target, as attributes: `kernels.rms_norm(x, weight, eps)`."""

    def __init__(self, target: Target, pins: Mapping[str, str] | None = None) -> None:
        pins = dict(pins or {})
        self.target = target
        self.chosen: dict[str, str] = {}
        for name, op in OPS.items():
            implementation = op.choose(target, pins.pop(name, None))
            self.chosen[name] = implementation.name
            setattr(self, name, implementation.function)
        if pins:
            raise ValueError(f"no such op: {', '.join(sorted(pins))}; there are: {', '.join(sorted(OPS))}")

    def hide_from_compiler(self) -> None:
        """Exclude all implementations but references from torch.compile, which could not improve them."""
        for name, implementation in self.chosen.items():
            if implementation != "reference":
                setattr(self, name, torch.compiler.disable(getattr(self, name)))  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Function:  # called only for names that are not ops
        raise AttributeError(f"no op is called {name!r}; there are: {', '.join(sorted(OPS))}")
