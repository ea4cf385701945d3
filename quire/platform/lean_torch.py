"""Imports torch without a part that only its compiler needs, and which takes a quarter of the time.

This is torch._meta_registrations: what operators do with tensors that have no memory. It is imported when something
reads it, or before one of the modules that torch would have imported with it.
"""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DEFERRED = "torch._meta_registrations"
_RELATED = {
    "torch._decomp",
    "torch._dynamo",
    "torch._inductor",
    "torch._prims",
    "torch._prims_common.wrappers",
    "torch._refs",
    "torch.utils._content_store",
}


def prepare() -> None:
    """To be called by a process of Quire's own before it imports torch; afterwards it has little effect."""
    # Importing torch creates 170,000 objects that stay alive. Python's default, a garbage collection after every 700
    # new objects, takes a fifth of the import time.
    gc.set_threshold(100_000)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Watch())


def _catch_up() -> ModuleType:
    """The module that was deferred."""
    if isinstance(sys.modules.get(_DEFERRED), _StandIn):
        del sys.modules[_DEFERRED]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    return import_module(_DEFERRED)


def _allow_generators() -> None:
    """torch 2.13 refuses to make a torch.Generator before a module that is deferred has done this."""
    torch: Any = sys.modules["torch"]
    if hasattr(torch._C, "_set_generator_metaclass"):
        torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by tools that look at all modules
            raise AttributeError(name)
        return getattr(_catch_up(), name)


class _Watch(MetaPathFinder, Loader):
    """Sees which modules are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _DEFERRED:
            _allow_generators()
            return ModuleSpec(name, self)
        if name not in _RELATED:
            return None
        _catch_up()
        module = sys.modules.get(name)
        if module is None:
            return None
        # It is imported now, and must not be loaded again: the import goes on with the module's own spec
        module.__spec__ = ModuleSpec(name, self, origin=module.__file__, is_package=hasattr(module, "__path__"))
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == _DEFERRED:
            return _StandIn(spec.name)
        return sys.modules[spec.name]  # imported meanwhile

    def exec_module(self, module: ModuleType) -> None:
        pass
