"""Imports torch without a module that only torch's compiler needs and that takes a quarter of the import time.

The module is torch._meta_registrations: the operators' implementations for tensors without memory. It is imported on
first access to its content, and before any module that depends on it. Untested versions of torch, and copies with
different files, are imported as usual.
"""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importing importlib.abc takes 10 ms

OLDEST = (2, 11)  # the versions that were tested
NEWEST = (2, 13)

_DEFERRED = "torch._meta_registrations"
_DEPENDENT = {
    "torch._decomp",
    "torch._dynamo",
    "torch._inductor",
    "torch._prims",
    "torch._prims_common.wrappers",
    "torch._refs",
    "torch.utils._content_store",
    "transformers",
}
_VERSION = re.compile(r"^__version__ = '(\d+)\.(\d+)\.\d+(?:\+\w+)?'$", re.MULTILINE)  # a release, no development build
_IMPORT = "    from torch import _meta_registrations\n"
_GENERATORS = "torch._C._set_generator_metaclass("


def prepare() -> None:
    """Defer the module. Call it only in Quire's own processes. It has no effect once torch is imported."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def can_defer(folder: Path) -> bool:
    """Whether the torch in this folder is one whose module can be deferred."""
    try:
        version = _VERSION.search((folder / "version.py").read_text())
        if version is None or not OLDEST <= (int(version[1]), int(version[2])) <= NEWEST:
            return False
        generators = (folder / "_prims" / "rng_prims.py").read_text()
        return (
            (folder / "_meta_registrations.py").is_file()
            and (folder / "__init__.py").read_text().count(_IMPORT) == 1
            and (_GENERATORS not in generators or f"\n{_GENERATORS}OpaqueBaseMeta)\n" in generators)
        )
    except OSError:
        return False


def _stop() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def _import_deferred() -> ModuleType:
    """Import the deferred module and its dependencies, in the order that torch intends."""
    if isinstance(sys.modules.get(_DEFERRED), _Placeholder):
        del sys.modules[_DEFERRED]
        _stop()
    return import_module(_DEFERRED)


def _allow_generators() -> None:
    """Initialize torch.Generator. Since torch 2.13, it cannot be used before this call. Normally, a module that
    is deferred here makes it."""
    torch: Any = sys.modules["torch"]
    if hasattr(torch._C, "_set_generator_metaclass"):
        torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # requested by tools that inspect all modules
            raise AttributeError(name)
        return getattr(_import_deferred(), name)


class _Finder:
    """Defers the module, and detects when another module needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin is None or not can_defer(Path(spec.origin).parent):
                _stop()
        elif name == _DEFERRED:
            _allow_generators()
            return ModuleSpec(name, _Existing(_Placeholder(name)))
        elif name in _DEPENDENT and _DEFERRED in sys.modules:
            _import_deferred()
            if (module := sys.modules.get(name)) is not None:
                spec = ModuleSpec(name, _Existing(module), is_package=hasattr(module, "__path__"))
                module.__spec__ = spec  # importlib uses it instead of the returned one
                return spec
        return None


class _Existing(Loader):
    """Loads an existing module. A module must not be executed twice."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if self._spec is not None:
            module.__spec__ = self._spec
