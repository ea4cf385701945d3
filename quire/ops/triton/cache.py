"""The location of compiled kernels: the folder `triton` in Quire's cache folder, which `quire compile` can fill on a
machine without a GPU. If TRITON_CACHE_DIR or TRITON_HOME is set, Triton's own folder is used."""

import atexit
import json
import logging
import os
import shutil
from functools import cache
from pathlib import Path

import triton
from triton.runtime.cache import FileCacheManager

from quire.ops import launchers
from quire.platform.folders import cache_folder, private_folder

logger = logging.getLogger("quire")


class KernelCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache on disk, with two differences: the folder may have been moved since it was filled, and it may be
    read-only. Kernels that cannot be written there are kept only for this process."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError:
            self._keep_elsewhere()

    def put(self, data, filename, binary=True) -> str:
        try:
            return str(super().put(data, filename, binary))
        except OSError:
            self._keep_elsewhere()
            return str(super().put(data, filename, binary))

    def get_group(self, filename: str) -> dict[str, str] | None:
        path = self.get_file(f"__grp__{filename}")
        try:
            names = json.loads(Path(path).read_text())["child_paths"] if path else {}
        except (OSError, ValueError, KeyError):
            return None
        paths = {name: self._make_path(name) for name in names}  # the file lists the paths at which they were written
        return paths if paths and all(os.path.exists(path) for path in paths.values()) else None

    def _keep_elsewhere(self) -> None:
        self.cache_dir = os.path.join(_private_folder(), self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


@cache
def _private_folder() -> str:
    folder = private_folder("quire-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        "GPU kernels are compiled and cannot be kept, since %s is not writable: every start compiles them again. "
        "Run quire compile with the options of quire serve when the image is built (docs/gpu.md).",
        triton.knobs.cache.dir,
    )
    return str(folder)


def use_folder(folder: Path | None) -> None:
    """Store kernels in this folder, for `quire compile --output`."""
    triton.knobs.cache.dir = _private_folder() if folder is None else str(folder / "triton")
    launchers.use_folder(folder)


def use_default_folder() -> None:
    """Store kernels in this user's cache folder."""
    if triton.knobs.cache.manager_class is None:
        triton.knobs.cache.manager_class = KernelCache
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        use_folder(cache_folder())
    else:
        launchers.use_folder(cache_folder())
