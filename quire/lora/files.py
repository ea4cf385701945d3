"""Finds the files of adapters, and tells adapters apart by their content. Without torch."""

from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path

from quire.loading.hub import resolve
from quire.messages.lora import Adapter, LoRARequest

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that exists


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Config and weights. Raises ValueError if one is missing."""
    weights = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    if weights is None or not (directory / CONFIG).is_file():
        raise ValueError(f"{directory} is no PEFT adapter: it needs {CONFIG} and {' or '.join(WEIGHTS)}")
    return directory / CONFIG, weights


def find_adapter(request: LoRARequest, download_dir: str | None = None, token: str | None = None) -> Adapter:
    """The adapter that a request names. It reads the files, the first time. Raises ValueError if there is none."""
    directory = resolve(request.lora_path, download_dir=download_dir, token=token).resolve()
    files = adapter_files(directory)
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return Adapter(request.lora_name, _content(stamps), str(directory))


@lru_cache(maxsize=1024)
def _content(stamps: tuple[tuple[str, int, int], ...]) -> str:
    """SHA-256 of the content of files. Sizes and times say whether they have changed."""
    digests = []
    for path, _, _ in stamps:
        with open(path, "rb") as stream:
            digests.append(file_digest(stream, "sha256").digest())
    return sha256(b"".join(digests)).hexdigest()
