"""The models in the Hugging Face hub's cache."""

import dataclasses
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints.errors import ModelNotFoundError
from quire.checkpoints.format_names import weight_files
from quire.checkpoints.hub import INDEXES, gguf_files, gguf_kinds, read_json, split_kind
from quire.checkpoints.hub import cache_folder as cache_folder
from quire.cli.models.facts import local_files

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_PREFIX = "models--"


@dataclass(frozen=True)
class CachedModel:
    """A repository in the cache, with all its revisions.

    folder: models--owner--name. size: bytes of all files, also of interrupted downloads. repository: the library's
    description; None for a folder that it does not list, since no file in it is complete.
    """

    name: str
    folder: Path
    size: int
    repository: "CachedRepoInfo | None"

    def snapshot(self, revision: str | None = None) -> Path | None:
        """Return the folder with the files of a branch, tag or commit. The default is `main` or, if there is none, the
        latest revision. None if there is no such folder.
        """
        if self.repository is None:
            return None
        by_name = dict(self.repository.refs)
        commits = sorted(self.repository.revisions, key=lambda commit: commit.last_modified)
        by_name |= {commit.commit_hash: commit for commit in commits}
        latest = commits[-1] if commits else None
        found: CachedRevisionInfo | None = by_name.get(revision) if revision else by_name.get("main", latest)
        return None if found is None else found.snapshot_path

    @property
    def last_used(self) -> float:
        """When the weights were last read, in seconds since 1970, as far as the file system records that."""
        snapshot = self.snapshot()
        if snapshot is None:
            return self.folder.stat().st_mtime
        files = local_files(snapshot)
        # Only weights count: listing models reads their other files.
        return max((snapshot / name).stat().st_atime for name in weight_files(files) or files or ["."])


def cached_models(download_dir: str | None) -> list[CachedModel]:
    """Return all models in the cache, by name. Raises OSError or ValueError for a cache that cannot be read."""
    from huggingface_hub import scan_cache_dir

    cache = cache_folder(download_dir)
    if not cache.exists():
        return []
    if not cache.is_dir():
        raise NotADirectoryError(f"{cache} is no folder, so it has no models")
    repositories = {repository.repo_path: repository for repository in scan_cache_dir(cache).repos}
    folders = [path for path in cache.resolve().glob(f"{_PREFIX}*") if path.is_dir()]
    models = [_model(folder, repositories.get(folder)) for folder in folders]
    return sorted(models, key=lambda model: model.name.lower())


def folder_of(name: str, download_dir: str | None) -> Path:
    """Return the folder in the cache where the files of a repository are, or would be."""
    return cache_folder(download_dir) / (_PREFIX + name.replace("/", "--"))


def complete_snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the files of a repository in the cache, or the first file of its GGUF model; None if there are none, or if
    some weights are missing. name: optionally with a kind of GGUF model."""
    repository, kind = split_kind(name)
    model = next((model for model in cached_models(download_dir) if model.name == repository), None)
    snapshot = None if model is None else model.snapshot(revision)
    if snapshot is None:
        return None
    files = local_files(snapshot)
    if kind is not None or (gguf_kinds(files) and all(name.endswith(".gguf") for name in weight_files(files))):
        try:
            return snapshot / gguf_files(files, kind)[0]
        except ModelNotFoundError:
            return None
    return None if lacks_weights(snapshot) else snapshot


def _model(folder: Path, repository: "CachedRepoInfo | None") -> CachedModel:
    name = folder.name.removeprefix(_PREFIX).replace("--", "/")
    if repository is None:
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    else:
        size = repository.size_on_disk + sum(path.stat().st_size for path in folder.glob("blobs/*.incomplete"))
    return CachedModel(name, folder, size, repository)


def lacks_weights(snapshot: Path) -> bool:
    """Whether a model's folder has no weights, or only some of the files listed in its index."""
    files = local_files(snapshot)
    if not weight_files(files):
        return True
    for kind in gguf_kinds(files):
        try:
            gguf_files(files, kind)
        except ModelNotFoundError:  # parts of a split file are missing
            return True
    index = next((name for name in INDEXES if name in files), None)
    if index is None or "model.safetensors" in files:
        return False
    try:
        return not files.keys() >= set(read_json(snapshot, index)["weight_map"].values())
    except (AttributeError, KeyError, TypeError, ValueError):  # a damaged index
        return True


def files_of_kind(model: CachedModel, kind: str) -> list[Path]:
    """Return the files of a GGUF model in all revisions."""
    revisions = [] if model.repository is None else [revision.snapshot_path for revision in model.repository.revisions]
    return [path / name for path in revisions for name in gguf_kinds(local_files(path)).get(kind, ())]


def has_other_weights(model: CachedModel, kind: str) -> bool:
    """Whether a model has weights other than the GGUF model of this kind."""
    revisions = () if model.repository is None else model.repository.revisions
    weights = {path for revision in revisions for path in _weights(revision.snapshot_path)}
    return bool(weights - set(files_of_kind(model, kind)))


def _weights(snapshot: Path) -> list[Path]:
    return [snapshot / name for name in weight_files(local_files(snapshot))]


def delete_files(files: list[Path]) -> int:
    """Delete files of snapshots, and the blobs that they link to. Returns the number of bytes freed."""
    contents = {file.resolve(): file.stat().st_size for file in files}
    for path in [*files, *contents]:
        path.unlink(missing_ok=True)
    return sum(contents.values())


def delete(model: CachedModel, download_dir: str | None) -> int:
    """Delete all revisions of a model. Returns the number of bytes freed. Raises OSError if some of it remains."""
    from huggingface_hub import scan_cache_dir

    if model.repository is None:
        shutil.rmtree(model.folder)
        return model.size
    info: HFCacheInfo = scan_cache_dir(cache_folder(download_dir))
    # Other repositories may have the same commits, and the library would delete these instead.
    own = dataclasses.replace(info, repos=frozenset({model.repository}))
    strategy = own.delete_revisions(*(commit.commit_hash for commit in model.repository.revisions))
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs what it cannot delete with a traceback
    strategy.execute()
    if model.folder.exists():
        raise PermissionError(f"{model.folder} could not be deleted; are its files another user's?")
    return strategy.expected_freed_size + model.size - model.repository.size_on_disk
