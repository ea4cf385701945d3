"""The shared state of Ollama's endpoints: created models, downloads and uploads."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.checkpoints.created import CreatedModel, CreatedModels
from quire.checkpoints.hub import hub_name, local_model
from quire.config.engine import ModelConfig
from quire.engine.async_llm import AsyncLLM
from quire.server.ollama.downloads import Downloads
from quire.server.ollama.facts import Facts, facts_of

LATEST = ":latest"


class Served(NamedTuple):
    """A model of the server. names: with those of its adapters. directory: its folder or GGUF file, if it is known."""

    names: Sequence[str]
    directory: Path | None


class Library:
    """The models that clients of Ollama's API may change: created and downloaded ones."""

    def __init__(self, options: ModelConfig, served: Callable[[], Sequence[Served]]) -> None:
        """served: returns the models of the server, which cannot be deleted."""
        self.library = CreatedModels(options.download_dir)
        self.downloads = Downloads(options)
        self.num_uploads = 0
        self._served = served

    def is_served(self, name: str) -> bool:
        return any(name in served.names for served in self._served())

    def is_file_of_served(self, path: Path) -> bool:
        return any(served.directory == path for served in self._served())

    def is_repository_of_served(self, name: str) -> bool:
        """Whether a served model comes from this repository. name: optionally with the quantization type of a GGUF
        model."""
        folders = [served.directory for served in self._served() if served.directory is not None]
        repositories = filter(None, (hub_name(f) or (hub_name(f.parent) if f.is_file() else None) for f in folders))
        return any(name.partition(":")[0].lower() == repository.lower() for repository, _ in repositories)


class State(Library):
    """With the served model."""

    def __init__(self, llm: AsyncLLM, model_names: list[str], names: Callable[[], Sequence[str]]) -> None:
        """names: returns the names of the model and its adapters."""
        options = llm.config.model
        super().__init__(options, lambda: [Served(names(), llm.frontend.directory)])
        self._llm = llm
        self._names = model_names
        self.base = canonical(options.model)
        self._facts: Facts | None = None

    @property
    def base_name(self) -> str:
        """The first name of the served model."""
        return self._names[0]

    async def facts(self) -> Facts:
        """Return the facts about the served model."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(facts_of, self._llm.frontend.directory, self._llm.config.model)
        return self._facts

    @property
    def usable(self) -> dict[str, CreatedModel]:
        """Return the created models that are based on the served model, by name."""
        return {name: model for name, model in self.library.all().items() if model.base == self.base}

    def created(self, name: str) -> CreatedModel | None:
        """Return the created model of a name, optionally with the tag `latest`, if it is based on the served model."""
        return self.usable.get(name.removesuffix(LATEST))


def canonical(model: str | None) -> str | None:
    """Return the option `model` as created models store it: a local folder or file by its absolute path."""
    local = None if model is None else local_model(model)
    return model if local is None else str(local.resolve())
