"""A server with several models in a thread of this process."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

import uvicorn

from quire.cli.models.served import found_models, need
from quire.config.engine import ModelConfig, ServerConfig
from quire.semantic.router import SemanticRouter
from quire.semantic.rules import Rules
from quire.server.app import Shared
from quire.server.multimodel.app import create_front_app
from quire.server.multimodel.declarations import ModelDeclaration
from quire.server.multimodel.memory import Machine
from quire.server.multimodel.rules import RuledRequests
from quire.server.multimodel.served_model import ServedModel
from quire.server.multimodel.table import ModelTable
from support.server import Client
from support.waiting import LONGEST

MIB = 1 << 20
OPTIONS = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 32 * MIB}
ONE = 300 * MIB  # more than a small model with these options needs, and less than half of what two need


def declare(name: str, model: Path | str | None = None, **fields: Any) -> ModelDeclaration:
    options = {**OPTIONS, **fields.pop("options", {})}
    return ModelDeclaration.create(name, None if model is None else str(model), options, **fields)


def copy_model(source: Path, target: Path) -> Path:
    """A copy of a checkpoint, of links, so that each copy has other files for those that find models by path."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


class ManyModels(Client):
    """The server; a context manager."""

    def __init__(self, declarations: Sequence[ModelDeclaration], memory: int = 4096 * MIB, **options: Any) -> None:
        """options: of ServerConfig."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="many models", daemon=True)
        self._thread.start()
        listening = socket.create_server(("127.0.0.1", 0))
        super().__init__(listening.getsockname()[1])
        self._config = ServerConfig.create(response_store="memory", **options)
        self.run(self._start(declarations, memory, listening))

    async def _start(self, declarations: Sequence[ModelDeclaration], memory: int, listening: socket.socket) -> None:
        shared = Shared.create(self._config)
        machine = Machine(memory, need)
        self.table = ModelTable(declarations, machine, shared, lambda: found_models(self._config, OPTIONS))
        await self.table.refresh()
        rules = self._config.rules
        self.semantic = None if rules is None else await SemanticRouter.start(Rules.read(Path(rules)))
        ruled = None if self.semantic is None else RuledRequests(self.semantic)
        app = create_front_app(self.table, shared, ModelConfig(), ruled)
        self.table.start()
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:
            assert not self._serving.done()
            await asyncio.sleep(0.01)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONGEST)

    def model(self, name: str) -> ServedModel:
        found = self.table.get(name)
        assert found is not None
        return found

    @property
    def states(self) -> dict[str, str]:
        """The status of each model, as GET /models tells."""
        return {entry["id"]: entry["status"]["value"] for entry in self.get("/models").json["data"]}

    def say(self, model: str | None, **fields: Any) -> str:
        """The greedy continuation of a prompt."""
        named = {} if model is None else {"model": model}
        return self.complete("Once upon a time", max_tokens=6, **named, **fields)["choices"][0]["text"]

    def loads(self, name: str) -> int:
        """How often a model has been loaded."""
        text = self.get("/metrics").body.decode()
        found = re.search(rf'^quire:model_load_seconds_count{{model_name="{name}"}} (\S+)$', text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self.run(asyncio.wait([self._serving]))
        self.run(self.table.close())
        if self.semantic is not None:
            self.run(self.semantic.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
