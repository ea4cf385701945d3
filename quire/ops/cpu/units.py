"""The translation units of the kernels: the sources and the kernels of each.

Each unit becomes a separate shared library, so a model waits only for the units that it needs, and a changed source
recompiles only its own units. All use the threads of the unit "team", which is loaded first.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path

TEAM = "team"
TYPES = {0: "float", 1: "bf16", 2: "fp16"}  # by the codes of build.py: C++ types, and suffixes of kernels
_STORAGES = {"": "0", "_cells": "1"}
# Sources that are compiled once for each type and storage, since that takes long
_BY_TYPE = ("attention",)
_FORMS = [*product(TYPES.values(), _STORAGES.items()), ("float", ("_fp16", "2"))]  # the last: float16 of float32
_KERNEL = re.compile(r"\bvoid (\w+)\(")
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_kernels_in = cache(_KERNEL.findall)  # by text: several units have the same source, and many the same headers
_included_by = cache(_INCLUDE.findall)


@dataclass(frozen=True)
class Unit:
    """name: the name of the unit, as in the name of its library. suffix: the suffix of its kernels' names, if other
    units define the same kernels for other types. defines: compiler options that select the type."""

    name: str
    source: Path
    suffix: str = ""
    defines: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        return self.source.read_text()

    @cached_property
    def kernels(self) -> frozenset[str]:
        return frozenset(f"{name}{self.suffix}" for name in _kernels_in(self.text))

    @property
    def flags(self) -> list[str]:
        """The unit's additional compiler options, which select the type and rename the kernels."""
        named = [name for name in sorted(_kernels_in(self.text)) if name.startswith("quire_") and self.suffix]
        renamed = {f"{name}{end}": f"{name}{self.suffix}{end}" for name in named for end in ("", "_recorded")}
        return [*self.defines, *(f"-D{name}={new}" for name, new in renamed.items())]

    def fingerprint(self, facts: Sequence[str]) -> str:
        """Return a hash of everything that its machine code depends on, except the compiler: `facts`, its source, and
        the included headers."""
        digest = hashlib.sha256("\0".join([*facts, *self.defines, self.suffix]).encode())
        for name, text in sorted(_with_headers(self.source.parent, self.text).items()):
            digest.update(f"{name}\0{text}".encode())
        return digest.hexdigest()[:32]


def read_units(folder: Path) -> dict[str, Unit]:
    """Return the units of the sources in a folder, by name."""
    found = {}
    for source in sorted(folder.glob("*.cpp")):
        name = source.stem
        if name not in _BY_TYPE:
            found[name] = Unit(name, source)
            continue
        for type_name, (storage, cells) in _FORMS:
            defines = (f"-DQUIRE_TYPE={type_name}", f"-DQUIRE_CELLS={cells}")
            suffix = f"_{type_name}{storage}"
            found[name + suffix] = Unit(name + suffix, source, suffix, defines)
    return found


_headers: dict[Path, tuple[int, str]] = {}  # texts by path, with the time of the last change


def _with_headers(folder: Path, text: str) -> dict[str, str]:
    """Return a source's text under the name "", and the texts of the headers in this folder that it includes, by
    name."""
    texts = {"": text}
    found = [text]
    while found:
        for name in _included_by(found.pop()):
            path = folder / name
            if name not in texts and path.is_file():
                changed = path.stat().st_mtime_ns
                if _headers.get(path, (0, ""))[0] != changed:
                    _headers[path] = changed, path.read_text()
                texts[name] = _headers[path][1]
                found.append(texts[name])
    return texts
