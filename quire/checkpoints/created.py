"""Models that clients of Ollama's API create: a name for another model or a GGUF file, with defaults.

They are stored in a folder of the hub's cache, as one JSON file each, with the GGUF files that clients have uploaded.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from quire.checkpoints.hub import cache_folder
from quire.messages.errors import error_text
from quire.observability.logging import logger

_FOLDER = ".quire"
_SUFFIX = ".json"


class CreatedModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """name: without the tag `latest`. base: the model behind the name, in the form of the option `model` (None for the
    bundled one). source: the name from which it was created.

    Defaults of requests: template (Jinja), system (a message), parameters (Ollama's options), and messages that begin
    each conversation. created: seconds since 1970.
    """

    name: str
    base: str | None
    source: str
    template: str | None = None
    system: str | None = None
    parameters: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    license: str | None = None
    created: float = msgspec.field(default_factory=time.time)


class CreatedModels:
    """The created models of a cache folder. Several processes may use it."""

    def __init__(self, download_dir: str | None) -> None:
        root = cache_folder(download_dir) / _FOLDER
        self._folder = root / "created"
        self.blobs = root / "blobs"
        self._models: dict[str, CreatedModel] = {}
        self._read_at: int | None = None  # the folder's modification time when it was read, in nanoseconds

    def all(self) -> dict[str, CreatedModel]:
        """Return the models by name. A file that is not a created model is logged and skipped."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError:
            return {}
        if changed != self._read_at:
            found = (self._read(path) for path in sorted(self._folder.glob(f"*{_SUFFIX}")))
            self._models = {model.name: model for model in found if model is not None}
            self._read_at = changed
        return self._models

    def write(self, model: CreatedModel) -> None:
        """Add a model, or replace the one with the same name. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(model)))
            os.replace(name, self._path(model.name))
            self._read_at = None
        except BaseException:
            os.unlink(name)
            raise

    def delete(self, name: str) -> None:
        """Delete a model, and its GGUF file if no other model has it. Raises OSError."""
        model = self.all().get(name)
        self._path(name).unlink(missing_ok=True)
        self._read_at = None
        if model is not None and model.base is not None and all(m.base != model.base for m in self.all().values()):
            path = Path(model.base)
            if path.parent == self.blobs:
                path.unlink(missing_ok=True)

    def blob(self, digest: str) -> Path:
        """Return the path of an uploaded blob, which need not exist. digest: 64 hexadecimal digits."""
        return self.blobs / f"sha256-{digest}.gguf"

    def unused_blobs(self) -> list[Path]:
        used = {model.base for model in self.all().values()}
        return [path for path in self.blobs.glob("sha256-*") if str(path) not in used]

    def _path(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{_SUFFIX}"

    def _read(self, path: Path) -> CreatedModel | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=CreatedModel)
        except (OSError, ValueError) as error:
            logger.warning("Ignored %s, which describes no created model: %s", path, error_text(error))
            return None
