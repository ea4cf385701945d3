"""The shared state of Ollama's endpoints: created models, downloads and uploads."""

import asyncio

from quire.checkpoints.created import CreatedModel, CreatedModels
from quire.checkpoints.hub import hub_name, local_model
from quire.engine.async_llm import AsyncLLM
from quire.server.ollama.downloads import Downloads
from quire.server.ollama.facts import Facts, facts_of

LATEST = ":latest"


class State:
    def __init__(self, llm: AsyncLLM, model_names: list[str]) -> None:
        options = llm.config.model
        self._llm = llm
        self._names = model_names
        self.base = canonical(options.model)
        self.library = CreatedModels(options.download_dir)
        self.downloads = Downloads(options)
        self.num_uploads = 0
        self._facts: Facts | None = None

    @property
    def base_name(self) -> str:
        """The first name of the served model."""
        return self._names[0]

    async def facts(self) -> Facts:
        """Return the facts about the served model."""
        if self._facts is None:
            self._facts = await asyncio.to_thread(facts_of, self._llm.frontend)
        return self._facts

    @property
    def usable(self) -> dict[str, CreatedModel]:
        """Return the created models that are based on the served model, by name."""
        return {name: model for name, model in self.library.all().items() if model.base == self.base}

    def created(self, name: str) -> CreatedModel | None:
        """Return the created model of a name, optionally with the tag `latest`, if it is based on the served model."""
        return self.usable.get(name.removesuffix(LATEST))

    def is_repository_of_served(self, name: str) -> bool:
        """Whether the served model comes from this repository. name: optionally with the quantization type of a GGUF
        model."""
        repository = hub_name(self._llm.frontend.directory)
        if repository is None and self._llm.frontend.directory.is_file():
            repository = hub_name(self._llm.frontend.directory.parent)
        return repository is not None and name.partition(":")[0].lower() == repository[0].lower()


def canonical(model: str | None) -> str | None:
    """Return the option `model` as created models store it: a local folder or file by its absolute path."""
    local = None if model is None else local_model(model)
    return model if local is None else str(local.resolve())
