"""Embeddings of short texts, computed by an engine in a process of its own."""

from secrets import token_hex
from typing import Self

import numpy as np
import numpy.typing as npt

from quire.engine.async_llm import AsyncLLM
from quire.messages.outputs import PoolingOutput
from quire.messages.pooling_params import PoolingParams
from quire.semantic.rules import Embedding

Vector = npt.NDArray[np.float32]
MAX_CHARS = 4000  # of a text; more cannot fit into the tokens that embedding models read


class Embedder:
    """Use `start` to create one, and `close` at the end."""

    def __init__(self, llm: AsyncLLM, max_tokens: int) -> None:
        self._llm = llm
        self._params = PoolingParams(task="embed", truncate_prompt_tokens=max_tokens)

    @classmethod
    async def start(cls, options: Embedding) -> Self:
        """Load the model. Raises ConfigError for wrong options, and EngineDeadError if it cannot be loaded."""
        llm = AsyncLLM(options.model, runner="pooling", log_stats=False, **options.options)
        try:
            await llm.start()
        except BaseException:
            await llm.shutdown()
            raise
        return cls(llm, min(options.max_tokens, llm.max_model_len))

    async def embed(self, text: str) -> Vector:
        """Return the normalized embedding of a text, [width]. Raises EngineDeadError or BusyError if the engine has
        failed or is overloaded."""
        found = None
        async for output in self._llm.encode(text[:MAX_CHARS], self._params, f"semantic-{token_hex(8)}"):
            assert isinstance(output.outputs, PoolingOutput)
            found = np.asarray(output.outputs.data, np.float32)
        assert found is not None
        return found / max(float(np.linalg.norm(found)), 1e-12)

    async def close(self) -> None:
        await self._llm.shutdown()
