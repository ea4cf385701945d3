"""Quire: an LLM inference and serving engine.

from quire import LLM, SamplingParams
print(LLM().generate("Once upon a time", SamplingParams(max_tokens=60))[0].outputs[0].text)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire._version import __version__

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM as AsyncLLM
    from quire.engine.llm import LLM as LLM
    from quire.messages.outputs import CompletionOutput as CompletionOutput
    from quire.messages.outputs import Logprob as Logprob
    from quire.messages.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.messages.outputs import RequestOutput as RequestOutput
    from quire.messages.pooling_params import PoolingParams as PoolingParams
    from quire.messages.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.messages.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from quire.messages.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.messages.sampling_params import SamplingParams as SamplingParams
    from quire.messages.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_NAMES = {  # by the module that they come from
    "engine.llm": "LLM",
    "engine.async_llm": "AsyncLLM",
    "messages.sampling_params": "SamplingParams BeamSearchParams RepetitionDetectionParams RequestOutputKind",
    "messages.pooling_params": "PoolingParams",
    "messages.structured_outputs": "StructuredOutputsParams",
    "messages.outputs": "PoolingRequestOutput RequestOutput CompletionOutput Logprob",
}
_HOME = {name: f"quire.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOME, "__version__"]


# How long idle OpenMP threads of torch spin. The library has no other setting for this, and reads it only when torch
# loads it. The default is milliseconds, which takes the cores away from the kernels' own threads (ops/cpu/team.h): a
# step of 16 streams takes 126 ms instead of 67.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import quire` and `quire --help` need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
