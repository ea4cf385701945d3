"""Hides every installed package that the reference image for GPUs lacks, to test on any machine what starts there:

    PYTHONPATH=benchmarks/gpu/image python ...

Python imports this file at its start, also in the processes that it starts. IMAGE_WHEELS: the names of packages that
travel to the image as wheels (benchmarks/gpu/wheels.sh), separated by spaces. They are not hidden.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Set
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from image_packages import ABSENT, PACKAGES, names_of, normalized

PROJECT = "quire-llm"


def with_requirements(names: Iterable[str], absent: Set[str]) -> set[str]:
    """Return the packages and what they require, without extras and without the absent packages."""
    found = set()
    unvisited = [*names]
    while unvisited:
        name = unvisited.pop()
        if name in found or name in absent:
            continue
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # it is on the image, but not here
            continue
        unvisited += [normalized(requirement) for requirement in requirements if "extra ==" not in requirement]
    return found


class Finder:
    """Finds modules and packages as usual, except those that are not on the image."""

    def __init__(self, present: set[str]) -> None:
        self._present = present
        owners = importlib.metadata.packages_distributions()
        self._hidden = {module for module, names in owners.items() if not present & {*map(normalized, names)}}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in self._hidden else PathFinder.find_spec(name, path, target)

    def find_distributions(self, *context: Any) -> Iterator[importlib.metadata.Distribution]:
        found = importlib.metadata.MetadataPathFinder.find_distributions(*context)
        return (package for package in found if normalized(package.metadata["Name"]) in self._present)

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


wheels = names_of(os.environ.get("IMAGE_WHEELS", ""))
present = with_requirements(names_of(PACKAGES) | wheels, names_of(ABSENT) - wheels)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder(present | {PROJECT})  # type: ignore[call-overload]
