"""Finds a model's files: in a directory, in the bundled model, or by a download from the Hugging Face hub."""

import json
import os
import re
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.config import ModelConfig
from quire.loading.errors import ModelNotFoundError
from quire.messages.errors import error_text

# The files of a repository that the engine reads. Python files and other frameworks' weights are not downloaded.
_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken"]
_TENSORS, _OLDER_TENSORS = ["*.safetensors"], ["pytorch_model*.bin", "medusa_lm_head.pt"]
# Files that are not needed: second copies of the weights (Mistral's own format, ONNX), and adapters in folders. Folders
# with a number belong to sentence-transformers (1_Pooling, 2_Dense), whose files are needed.
_LEFT_OUT = ["consolidated*", "[!0-9]*/*.safetensors", "[!0-9]*/*.json", "[!0-9]*/*.txt"]
_BUNDLED = "quire-demo/"


def bundled_model() -> Path:
    """The directory of the model that comes with Quire."""
    return Path(str(files("quire.demo") / "model"))


_Name = str | None


def local_model(model: _Name) -> Path | None:
    """The local directory or .gguf file that a name means, None if it is the name of a model of the hub. The drafters
    of the bundled model are called quire-demo/eagle3, quire-demo/medusa and quire-demo/draft, and its adapter
    quire-demo/rhyme. Raises ModelNotFoundError for a name that is neither."""
    if model is None:
        return bundled_model()
    if model.startswith(_BUNDLED):
        for kind in ("speculators", "adapters"):
            if (bundled := bundled_model().parent / kind / model.removeprefix(_BUNDLED)).is_dir():
                return bundled
    path = Path(os.path.expanduser(model))  # for a user without a home, Path.expanduser would raise an error
    if path.is_dir():
        return _gguf_in(path) or path
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        message = f"model {model!r} is neither a directory nor a Hugging Face id (owner/name), nor a .gguf file"
        raise ModelNotFoundError(message)
    return None


def resolve(
    model: _Name, revision: _Name = None, download_dir: _Name = None, token: _Name = None, weights: bool = True
) -> Path:
    """The local directory of a model, or its .gguf file. A model of the hub is downloaded if it is not cached.

    weights: False downloads no tensors, for dummy weights or if only the tokenizer is needed. Raises
    ModelNotFoundError.
    """
    if (local := local_model(model)) is not None:
        return local
    assert model is not None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: list[str]) -> Path:
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir, token=token, allow_patterns=patterns,
            ignore_patterns=_LEFT_OUT,
        )  # fmt: skip
        return Path(found)

    try:
        found = fetch([*_PATTERNS, *_TENSORS] if weights else _PATTERNS)
        if weights and not any(found.glob("*.safetensors")):
            fetch(_OLDER_TENSORS)  # only if the repository has no safetensors
        return found
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        reason = error_text(error).split("\n")[0]
        message = f"model {model!r} is no directory here and could not be fetched from the hub: {reason}"
        raise ModelNotFoundError(message) from error


def files_of_model(names: Collection[str]) -> list[str]:
    """Those of a repository's files that `resolve` downloads."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    def chosen(patterns: list[str]) -> list[str]:
        return list(filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=_LEFT_OUT))

    found = chosen([*_PATTERNS, *_TENSORS])
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in found)
    return found if has_safetensors else found + chosen(_OLDER_TENSORS)


def hub_name(directory: Path) -> tuple[str, str] | None:
    """The name and the commit of a model of the hub, by the folder of its files: models--owner--name/snapshots/commit.
    None for any other folder."""
    name = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not name.startswith("models--"):
        return None
    return name.removeprefix("models--").replace("--", "/"), directory.name


def model_directory(options: ModelConfig) -> Path:
    """The local directory or .gguf file of the model that the options name. Raises ModelNotFoundError."""
    weights = options.load_format != "dummy"
    return resolve(options.model, options.revision, options.download_dir, options.hf_token, weights)


def tokenizer_directory(options: ModelConfig, model: Path) -> Path:
    """The directory or GGUF file that has the tokenizer: the model's, unless the options name another."""
    if options.tokenizer is None:
        return model
    return resolve(options.tokenizer, options.tokenizer_revision, options.download_dir, options.hf_token, weights=False)


def _gguf_in(directory: Path) -> Path | None:
    """The only GGUF file of a directory, or the first part of it. None if there is a config.json or no GGUF file.

    Raises ModelNotFoundError for several GGUF models.
    """
    if (directory / "config.json").exists():
        return None
    found = sorted(f for f in directory.glob("*.gguf") if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", f.name))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelNotFoundError(f"{directory} has several models, give one of them: {names}")
    return found[0] if found else None


def read_json(directory: Path, name: str, required: bool = False) -> dict[str, Any]:
    """The JSON object in a file of a directory; {} for an absent file, unless required. Raises ModelNotFoundError."""
    path = directory / name
    if not path.is_file():
        if required:
            raise ModelNotFoundError(f"{directory} has no {name}; is it a checkpoint in the Hugging Face layout?")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFoundError(f"{path} is not valid JSON: {error_text(error)}") from error
    if not isinstance(value, dict):
        raise ModelNotFoundError(f"{path} holds no JSON object")
    return value
