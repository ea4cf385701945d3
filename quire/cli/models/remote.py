"""A model on the Hugging Face hub, before it is downloaded."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.checkpoints.format_names import weight_files
from quire.checkpoints.gguf import read_part
from quire.checkpoints.hub import INDEXES, files_of_model, gguf_files, gguf_kinds, split_kind
from quire.cli.models.facts import Facts, facts_of
from quire.cli.models.words import size_text
from quire.messages.errors import error_text
from quire.platform.folders import private_folder

_TIMEOUT = 30.0  # seconds
_HEAD_BYTES = 4 << 20  # of a GGUF file: a large vocabulary takes ten million
_TABLE_BYTES = 1 << 18  # of a safetensors file: a thousand tensors take a hundred thousand
_MOST_HEAD_BYTES = 256 << 20
_SMALL = (  # what describes a model; tokenizers and indexes of weights are larger, and not needed for that
    "config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
_SMALL_IN_FOLDERS = r"additional_chat_templates/[^/]*\.jinja|\d[^/]*/config\.json"


class HubUnreachableError(ModelNotFoundError):
    """The hub does not respond, so it is unknown whether it has the model."""


@dataclass(frozen=True)
class RemoteModel:
    """A revision of a repository. commit: its hash. files: the sizes of all its files in bytes. blobs: the name of each
    file's content in the cache. licence: from the model card. kind: of the GGUF model, if one is named."""

    name: str
    kind: str | None
    commit: str
    files: Mapping[str, int]
    blobs: Mapping[str, str]
    licence: str | None

    @property
    def needed(self) -> dict[str, int]:
        """The files that an engine loads, with their sizes. Raises ModelNotFoundError for a missing kind."""
        return {name: self.files[name] for name in self.gguf or files_of_model(self.files)}

    @property
    def gguf(self) -> list[str]:
        """The files of the GGUF model, if one is named or if the repository has no other weights."""
        if self.kind is None and (weight_files(files_of_model(self.files)) or not gguf_kinds(self.files)):
            return []
        return gguf_files(self.files, self.kind)

    @property
    def full_name(self) -> str:
        """The name, with the kind of the GGUF model."""
        kind = next((kind for kind, names in gguf_kinds(self.files).items() if names == self.gguf), None)
        return self.name if kind is None else f"{self.name}:{kind}"

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """A line about the kinds of GGUF models, if there are several."""
        kinds = gguf_kinds(self.files) if self.gguf else {}
        sizes = [f"{kind} ({size_text(sum(self.files[name] for name in names))})" for kind, names in kinds.items()]
        return [("kinds", ", ".join(sizes))] if len(sizes) > 1 else []

    def missing(self, folder: Path) -> dict[str, int]:
        """Return the files missing from the repository's folder in the cache, with the bytes to download for each: none
        if an earlier commit has the same file.
        """
        snapshot = folder / "snapshots" / self.commit
        blobs = folder / "blobs"
        absent = {name: size for name, size in self.needed.items() if not (snapshot / name).exists()}
        return {name: 0 if (blobs / self.blobs[name]).exists() else size for name, size in absent.items()}


def ask_hub(model: str, revision: str | None, token: Any) -> RemoteModel:
    """model: a repository, optionally with a kind of GGUF model. Raises ModelNotFoundError, and HubUnreachableError if
    the hub does not answer."""
    from huggingface_hub import HfApi

    name, kind = split_kind(model)
    with _explained(name, revision, token):
        info = HfApi().model_info(name, revision=revision, token=token, files_metadata=True, timeout=_TIMEOUT)
    files = dict[str, int]()
    blobs = dict[str, str]()
    for file in info.siblings or ():
        files[file.rfilename] = file.size or 0
        blobs[file.rfilename] = (file.lfs.sha256 if file.lfs else file.blob_id) or "unknown"
    licence = getattr(info.card_data, "license", None)
    return RemoteModel(name, kind, str(info.sha), files, blobs, licence if isinstance(licence, str) else None)


def describe(model: RemoteModel, token: Any) -> Facts:
    """Return the facts of a model, from its small files or from the beginnings of its GGUF files, which are not stored.
    Raises ModelNotFoundError, and WeightError for a file that is not a GGUF file.
    """
    with small_files(model, token) as path:
        return replace(facts_of(path, model.files), licence=model.licence)


@contextmanager
def small_files(model: RemoteModel, token: Any, with_tensors: bool = False) -> Iterator[Path]:
    """Provide a temporary folder with the small files of a model, or the first of its GGUF files without tensors.

    with_tensors: also the index of the weights or, if there is none, the beginnings of the safetensors files.
    """
    from huggingface_hub import hf_hub_download

    folder = private_folder("quire-model-")
    try:
        with _explained(model.name, model.commit, token), progress_bars(shown=False):
            heads = [_fetch_head(model, name, folder, token, _HEAD_BYTES, _lacks_gguf) for name in model.gguf]
            if not heads:
                small = [name for name in model.files if name in _SMALL or re.fullmatch(_SMALL_IN_FOLDERS, name)]
                indexes = [name for name in INDEXES if name in model.files] if with_tensors else []
                for name in (*small, *indexes):
                    hf_hub_download(model.name, name, revision=model.commit, token=token, local_dir=folder)
                if with_tensors and not indexes:
                    for name in (name for name in model.needed if name.endswith(".safetensors") and "/" not in name):
                        _fetch_head(model, name, folder, token, _TABLE_BYTES, _lacks_table)
        yield heads[0] if heads else folder
    except WeightError as error:
        raise WeightError(error_text(error).replace(f"{folder}/", "")) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lacks_gguf(path: Path) -> bool:
    """Whether the beginning of a GGUF file ends before the description of its tensors does."""
    try:
        read_part(path)
    except WeightError as error:
        return "ends early" in error_text(error)  # otherwise, only the tensors' data is missing
    return True


def _lacks_table(path: Path) -> bool:
    """Whether the beginning of a safetensors file ends before its table of tensors does."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    return path.stat().st_size < 8 + size


def _fetch_head(
    model: RemoteModel, name: str, folder: Path, token: Any, size: int, lacks: Callable[[Path], bool]
) -> Path:
    """Return a sparse file with the beginning of a file of weights: everything before the tensors, followed by a hole.

    Only the beginning takes disk space. Its length is only known after reading it. size: bytes to fetch first. lacks:
    whether more bytes are needed.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    path = folder / Path(name).name
    total = model.files[name]
    have = 0
    url = hf_hub_url(model.name, name, revision=model.commit)
    headers = {**build_hf_headers(token=token), "Accept-Encoding": "identity"}
    path.touch()
    while have < min(total, _MOST_HEAD_BYTES):
        part = {"Range": f"bytes={have}-{min(size, total) - 1}"}
        answer = get_session().get(url, headers={**headers, **part}, timeout=_TIMEOUT)
        hf_raise_for_status(answer)
        with path.open("ab") as file:
            file.write(answer.content)
            have = file.tell()
        if not lacks(path):
            break
        size *= 4
    os.truncate(path, total)
    return path


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether the library shows progress bars."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _explained(name: str, revision: str | None, token: Any) -> Iterator[None]:
    """Turn the library's errors into one line with advice."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    try:
        yield
    except errors.GatedRepoError as error:
        message = f"model {name!r} is gated: accept its licence at {ENDPOINT}/{name}; {_missing_access(token)}"
        raise ModelNotFoundError(message) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {name!r}, or it is private and needs hf_token") from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"model {name!r} has no revision {revision!r} on the hub") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is no name of a model on the hub: {_first_line(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubUnreachableError("HF_HUB_OFFLINE forbids to ask the hub") from error
    except errors.HfHubHTTPError as error:
        raise HubUnreachableError(f"the hub answers with an error: {_first_line(error)}") from error
    except RuntimeError as error:  # a user without a home
        raise ModelNotFoundError(f"the hub cannot be asked: {_first_line(error)} Set HF_HOME to a folder") from error
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # of this machine's files
            raise
        # The library's HTTP client has its own errors, and the client depends on the library's version.
        raise HubUnreachableError(f"the hub ({ENDPOINT}) cannot be reached: {_first_line(error)}") from error


def _missing_access(token: Any) -> str:
    if isinstance(token, str):
        return "the given hf_token has no access"
    return "give a token with hf_token or in the environment as HF_TOKEN"


def _first_line(error: Exception) -> str:
    return error_text(error).split("\n")[0]
