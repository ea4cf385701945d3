"""Imports torch without modules that inference does not need and that take a third of the import time.

Most of them are packages for training. torch._meta_registrations contains the operators' implementations for tensors
without memory, which only torch's compiler needs. All of them are imported on first access to the content of any, and
before any module that depends on them. Untested versions of torch, and copies with different files, are imported as
usual.
"""

import re
import sys
from collections.abc import Iterable, Sequence
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

_META = "torch._meta_registrations"
_DEFERRED = (  # in the order in which torch imports them
    "torch.utils.data",
    "torch.distributions",
    "torch.optim",
    "torch.profiler",
    "torch.ao",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.quasirandom",
    "torch.masked",
    _META,
)
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
    """Defer the modules. Call it only in Quire's own processes. It has no effect once torch is imported."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def can_defer(folder: Path) -> bool:
    """Whether the torch in this folder is one whose modules can be deferred."""
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


def _import_deferred() -> None:
    """Import the deferred modules and their dependencies, in the order that torch intends."""
    _stop()
    waiting = [name for name in _DEFERRED if isinstance(sys.modules.get(name), _Placeholder)]
    for name in waiting:
        del sys.modules[name]
    for name in waiting:
        import_module(name)


def _allow_generators() -> None:
    """Initialize torch.Generator. Since torch 2.13, it cannot be used before this call. Normally, a module that
    is deferred here makes it."""
    torch: Any = sys.modules["torch"]
    if hasattr(torch._C, "_set_generator_metaclass"):
        torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


class _Placeholder(ModuleType):
    """Stands for a deferred module. Code that got it before the module was imported can still use it."""

    def _module(self) -> ModuleType:
        _import_deferred()
        return import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # requested by tools that inspect all modules
            raise AttributeError(name)
        return getattr(self._module(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._module(), name, value)

    def __dir__(self) -> Iterable[str]:
        return dir(self._module())


class _Finder:
    """Defers the modules, and detects when another module needs them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.origin is None or not can_defer(Path(spec.origin).parent):
                _stop()
        elif name in _DEFERRED:
            if name == _META:
                _allow_generators()
            return _placeholder(name, path)
        elif (name in _DEPENDENT and _META in sys.modules) or name.rpartition(".")[0] in _DEFERRED:
            _import_deferred()
            if (module := sys.modules.get(name)) is not None:
                spec = ModuleSpec(name, _Existing(module), is_package=hasattr(module, "__path__"))
                module.__spec__ = spec  # importlib uses it instead of the returned one
                return spec
        return None


def _placeholder(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if (real := PathFinder.find_spec(name, path)) is None:
        return None
    spec = ModuleSpec(name, _Existing(_Placeholder(name)))
    spec.submodule_search_locations = real.submodule_search_locations
    return spec


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
