"""Finds a model's files: in a directory, in the bundled model, or on the Hugging Face hub, from which it downloads
them."""

import json
import os
import re
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import ModelNotFoundError
from quire.config.engine import ModelConfig
from quire.messages.errors import error_text
from quire.platform.files import MIB, FileError, check_folder, read_bytes

# The files of a repository that the engine reads. Python files and other frameworks' weights are not downloaded.
_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken"]
_TENSORS = ["*.safetensors", "colbert_linear.pt", "sparse_linear.pt"]
_OLDER_TENSORS = ["pytorch_model*.bin", "medusa_lm_head.pt"]
# Files that are not needed: second copies of the weights (Mistral's own format, ONNX), and adapters in folders. Folders
# with a number belong to sentence-transformers (1_Pooling, 2_Dense), whose files are needed.
_LEFT_OUT = ["consolidated*", "[!0-9]*/*.safetensors", "[!0-9]*/*.json", "[!0-9]*/*.txt"]
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_BUNDLED = "quire-demo/"
# A GGUF file of a repository: its kind, such as Q4_K_M or UD-Q4_K_XL, and its number among the parts of a split file.
_GGUF = re.compile(
    r"(?:.*?[-._/])?((?:UD-)?(?:[IT]?Q\d\w*|(?:MX|NV)FP4\w*|BF16|F16|F32))(?:-\d{5}-of-(\d{5}))?\.gguf", re.IGNORECASE
)
_USUAL_KIND = "Q4_K_M"
_JSON = 64 * MIB  # bytes of a file: the index of a model with a trillion parameters takes 10 MiB
# The files that are read. They must be regular files.
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors", ".bin", ".pt", ".gguf")


def cache_folder(download_dir: str | None) -> Path:
    """Return the folder of downloaded models. download_dir: the option; None for huggingface_hub's own folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(os.path.expanduser(download_dir or HF_HUB_CACHE))  # Path.expanduser fails for a user without a home


def bundled_model() -> Path:
    """Return the directory of the model that comes with Quire."""
    return Path(str(files("quire.demo") / "model"))


_Name = str | None


def local_model(model: _Name) -> Path | None:
    """Return the local directory or .gguf file of a name, None for the name of a model on the hub. The bundled model's
    drafters are quire-demo/eagle3, quire-demo/medusa and quire-demo/draft. Its adapter is quire-demo/rhyme, and its
    version with an image encoder quire-demo/vision. Raises ModelNotFoundError for any other name."""
    if model is None:
        return bundled_model()
    if model.startswith(_BUNDLED):
        for kind in ("speculators", "adapters", "."):
            if (bundled := bundled_model().parent / kind / model.removeprefix(_BUNDLED)).is_dir():
                return bundled
    path = Path(os.path.expanduser(model))  # for a user without a home, Path.expanduser would raise an error
    if path.is_dir():
        return _gguf_in(path) or path
    if path.is_file() and path.suffix == ".gguf":
        return path
    names_path = path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf"
    if names_path and not path.exists():
        raise ModelNotFoundError(f"model {model!r}: no such file or directory")
    if names_path or model.count("/") != 1:
        message = f"model {model!r} is neither a directory nor a Hugging Face id (owner/name), nor a .gguf file"
        raise ModelNotFoundError(message)
    return None


def resolve(
    model: _Name, revision: _Name = None, download_dir: _Name = None, token: _Name = None, weights: bool = True
) -> Path:
    """Return the local directory of a model, or its .gguf file. A model on the hub is downloaded if it is not cached.

    weights: False downloads no tensors, for dummy weights or if only the tokenizer is needed. Raises
    ModelNotFoundError, also for a pipe or a device, which would block the reader.
    """
    found = _find(model, revision, download_dir, token, weights)
    try:
        check_folder(found if found.is_dir() else found.parent, _READ)
    except FileError as error:
        raise ModelNotFoundError(error_text(error)) from error
    return found


def _find(model: _Name, revision: _Name, download_dir: _Name, token: _Name, weights: bool) -> Path:
    if (local := local_model(model)) is not None:
        return local
    assert model is not None
    model, kind = split_kind(model)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: list[str], left_out: list[str] = _LEFT_OUT) -> Path:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=left_out,
        )
        return Path(found)

    try:
        if kind is not None:
            found = fetch(*_gguf_patterns(kind))
            return found / gguf_files(_names_in(found), kind)[0]
        found = fetch([*_PATTERNS, *_TENSORS] if weights else _PATTERNS)
        config = found / "config.json"
        if weights and config.exists() and b"JinaEmbeddingsV5Model" in read_bytes(config, MIB):
            fetch(["adapters/*"], [])
        if weights and not any(found.glob("*.safetensors")):
            fetch(_OLDER_TENSORS)  # only if the repository has no safetensors
            if not any(found.glob("*.bin")) and not any(found.glob("medusa_lm_head.pt")):
                if not gguf_kinds(names := _names_in(found)):
                    names = HfApi(token=token).list_repo_files(model, revision=revision)
                if gguf_kinds(names):
                    return fetch(names := gguf_files(names, None)) / names[0]
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        reason = error_text(error).split("\n")[0]
        message = f"model {model!r} is no directory here and could not be fetched from the hub: {reason}"
        raise ModelNotFoundError(message) from error


def files_of_model(names: Collection[str]) -> list[str]:
    """Return the files of a repository that `resolve` downloads."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    def chosen(patterns: list[str]) -> list[str]:
        return list(filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=_LEFT_OUT))

    found = chosen([*_PATTERNS, *_TENSORS])
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in found)
    return found if has_safetensors else found + chosen(_OLDER_TENSORS)


def split_kind(model: str) -> tuple[str, _Name]:
    """Split a name such as owner/name:Q4_K_M into the repository and the kind of GGUF model, or None. Raises
    ModelNotFoundError for an invalid kind.
    """
    name, _, kind = model.partition(":")
    if kind in ("", "latest"):
        return name, None
    if not _GGUF.fullmatch(f"{kind}.gguf"):
        raise ModelNotFoundError(f"{kind!r} in {model!r} is no kind of GGUF model, such as {_USUAL_KIND} or Q8_0")
    return name, kind.upper()


def gguf_kinds(names: Collection[str]) -> dict[str, list[str]]:
    """Return the GGUF models among a repository's files: for each kind its files, with the parts of a split file in
    order."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        if (match := _GGUF.fullmatch(name)) and "mmproj" not in name:  # mmproj files contain image encoders
            kinds.setdefault(match[1].upper(), []).append(name)
    return kinds


def gguf_files(names: Collection[str], kind: _Name) -> list[str]:
    """Return the files of one GGUF model. kind: None selects the only one or, among several, Q4_K_M. Raises
    ModelNotFoundError."""
    kinds = gguf_kinds(names)
    chosen = kind or (next(iter(kinds)) if len(kinds) == 1 else _USUAL_KIND)
    if chosen not in kinds:
        raise ModelNotFoundError(
            f"there is no GGUF model {chosen}, only {', '.join(kinds) or 'other files'}; "
            "choose one with owner/name:KIND"
        )
    found = kinds[chosen]
    match = _GGUF.fullmatch(found[0])
    if len(found) != int(match[2] or 1 if match else 1):
        raise ModelNotFoundError(f"the GGUF model {chosen} is not one file or all parts of one: {', '.join(found)}")
    return found


def _gguf_patterns(kind: str) -> tuple[list[str], list[str]]:
    """Return the patterns of the files of a kind, in upper or lower case, and of those to exclude."""
    any_case = "".join(f"[{c.lower()}{c}]" if c.isalpha() else c for c in kind)
    ends = [f"{any_case}.gguf", f"{any_case}-?????-of-?????.gguf"]
    return [*ends, *(f"*[-._/]{end}" for end in ends)], ["*mmproj*", *([] if "UD-" in kind else ["*UD-*"])]


def _names_in(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def hub_name(directory: Path) -> tuple[str, str] | None:
    """Return the name and the commit of a hub model, from the folder of its files:
    models--owner--name/snapshots/commit. None for any other folder."""
    name = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not name.startswith("models--"):
        return None
    return name.removeprefix("models--").replace("--", "/"), directory.name


def model_directory(options: ModelConfig, weights: bool = True) -> Path:
    """Return the local directory or .gguf file of the model that the options name. Raises ModelNotFoundError.

    weights: False downloads no tensors.
    """
    weights = weights and options.load_format != "dummy"
    return resolve(options.model, options.revision, options.download_dir, options.hf_token, weights)


def tokenizer_directory(options: ModelConfig, model: Path) -> Path:
    """Return the directory or GGUF file with the tokenizer: the model's, unless the options name another."""
    if options.tokenizer is None:
        return model
    return resolve(options.tokenizer, options.tokenizer_revision, options.download_dir, options.hf_token, weights=False)


def _gguf_in(directory: Path) -> Path | None:
    """Return the only GGUF file of a directory, or its first part. None if there is a config.json or no GGUF file.

    Raises ModelNotFoundError for several GGUF models.
    """
    if (directory / "config.json").exists():
        return None
    found = sorted(f for f in directory.glob("*.gguf") if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", f.name))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelNotFoundError(f"{directory} has several models, give one of them: {names}")
    return found[0] if found else None


def read_json(directory: Path, name: str, required: bool = False, most: int = _JSON) -> dict[str, Any]:
    """Return the JSON object in a file of a directory; {} for a missing file, unless it is required. Raises
    ModelNotFoundError.

    most: the maximum size of the file in bytes.
    """
    path = directory / name
    try:
        value = json.loads(read_bytes(path, most).decode("utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelNotFoundError(
                f"{directory} has no {name}; is it a checkpoint in the Hugging Face layout?"
            ) from None
        return {}
    except (FileError, OSError) as error:
        raise ModelNotFoundError(error_text(error)) from error
    except (ValueError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error_text(error)}") from error
    if not isinstance(value, dict):
        raise ModelNotFoundError(f"{path} holds no JSON object")
    return value
