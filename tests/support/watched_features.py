"""Which features the engines of this process have: by their options and models, their requests and their outputs.

`pytest --record-features` watches its own process (support/combinations.py), and those of the servers that tests start
as commands (support/watched_commands/sitecustomize.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from quire.config import features as f
from quire.config.features import Feature, Setup
from quire.engine.frontend import Frontend
from quire.engine.output_processor import OutputProcessor
from quire.engine.processor import Processor
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest
from quire.models.description import describe

Tell = Callable[[int, set[str]], None]  # the number of an engine, and features that it has had together


def _on(*features: Feature) -> Callable[[Setup], bool]:
    return lambda setup: any(feature.is_on(setup) for feature in features)


def _of_engine(is_on: Callable[[Any], bool]) -> Callable[[Setup], bool]:
    return lambda setup: setup.engine is not None and is_on(setup.engine)


# By options and models.
OF_ENGINES: dict[str, Callable[[Setup], bool]] = {
    "sliding window": _on(f.WINDOWS),
    "priority": _of_engine(lambda c: c.scheduler.scheduling_policy == "priority"),
    "two steps in flight": _on(f.ASYNC_SCHEDULING),
    "whole prompts": _on(f.NO_CHUNKED_PREFILL),
    "long_prefill_token_threshold": _on(f.LONG_PREFILL),
    "max_itl": _on(f.MAX_ITL),
    "experts": lambda setup: not f.NO_EXPERTS.is_on(setup),
    "latent attention": _on(f.LATENT),
    "recurrent layers": _on(f.RECURRENT),
    "sparse attention": _on(f.SPARSE),
    "attention chunks": _on(f.CHUNKS),
    "sinks and ALiBi": _on(f.SINKS, f.ALIBI),
    "cross-attention": _on(f.CROSSED),
    "quantization": _on(f.QUANTIZATION),
    "one-byte KV cache": _on(f.INT8_CACHE, f.FP8_CACHE),
    "torch_compile": _on(f.TORCH_COMPILE),
    "batch invariance": _on(f.BATCH_INVARIANT),
    "transformers' models": _on(f.TRANSFORMERS),
    "tensor parallelism": _on(f.TENSOR_PARALLEL),
    "sequence parallelism": _on(f.SEQUENCE_PARALLEL),
    "data parallelism": _on(f.DATA_PARALLEL),
    "pipeline parallelism": _on(f.PIPELINE_PARALLEL),
    "context parallelism": _on(f.DECODE_CONTEXT, f.PREFILL_CONTEXT),
    "expert parallelism": _on(f.EXPERT_PARALLEL),
    "KV tiers": _on(f.TIERS),
    "prefill and decode apart": _on(f.TRANSFER),
    "KV events": _on(f.KV_EVENTS),
    "KV compression": _on(f.COMPRESSION),
    "proposers on the host": _on(f.HOST_PROPOSERS),
    "drafters on the device": _on(f.DRAFTERS),
}
# By requests.
OF_REQUESTS: dict[str, Callable[[EngineCoreRequest], bool]] = {
    "seeded sampling": lambda r: not r.sampling_params.greedy and r.sampling_params.seed is not None,
    "stop strings": lambda r: bool(r.sampling_params.stop),
    "n > 1": lambda r: r.sampling_params.n > 1,
    "penalties and token rules": lambda r: bool(
        r.sampling_params.presence_penalty
        or r.sampling_params.frequency_penalty
        or r.sampling_params.repetition_penalty != 1
        or r.sampling_params.logit_bias
        or r.sampling_params.allowed_token_ids
        or r.bad_words
    ),
    "logprobs": lambda r: r.sampling_params.logprobs is not None,
    "prompt logprobs": lambda r: r.sampling_params.prompt_logprobs is not None,
    "structured outputs": lambda r: r.sampling_params.structured_outputs is not None,
    "thinking budgets": lambda r: r.thinking is not None,
    "adapters": lambda r: r.adapter is not None,
    "multimodal input": lambda r: bool(r.media),
}
# By outputs.
OF_OUTPUTS: dict[str, Callable[[EngineCoreOutput], bool]] = {
    "prefix caching": lambda output: output.num_cached_tokens > 0,
    "preemption": lambda output: output.num_preemptions > 0,
}
# By several of these: whether a prompt is longer than a step, and who asked.
FURTHER = ("chunked prefill", "beam search")
FEATURES = [*FURTHER, *OF_OUTPUTS, *OF_REQUESTS, *OF_ENGINES]


class Engine:
    """One engine. tell: called with the features that its requests and outputs have, together with its own."""

    def __init__(self, frontend: Frontend, tell: Callable[[set[str]], None]) -> None:
        config = frontend.config
        setup = Setup(config, model=describe(frontend.directory, config.model).facts)
        self.own = {name for name, is_on in OF_ENGINES.items() if is_on(setup)}
        tokens = config.scheduler.tokens_of_a_step(gpu=False)
        self.longest_chunk = min(config.scheduler.long_prefill_token_threshold or tokens, tokens)
        self._tell = tell

    def has(self, *features: str) -> None:
        self._tell({*self.own, *features})

    def asked(self, requests: Iterable[EngineCoreRequest]) -> None:
        for request in requests:
            self.has(*(name for name, is_on in OF_REQUESTS.items() if is_on(request)))
            if len(request.prompt_token_ids) > self.longest_chunk and "whole prompts" not in self.own:
                self.has("chunked prefill")

    def returned(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if features := [name for name, is_on in OF_OUTPUTS.items() if is_on(output)]:
                self.has(*features)


class Watcher:
    """Watches the engines of this process."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._numbers = count()
        self.by_processor: WeakKeyDictionary[Processor, Engine] = WeakKeyDictionary()
        self._by_outputs: WeakKeyDictionary[OutputProcessor, Engine] = WeakKeyDictionary()
        self._by_request: dict[int, tuple[Any, Engine]] = {}  # the last requests by their ids, which are kept alive
        after(Frontend, "__init__", self._started)
        after(Processor, "process", self._asked)
        after(OutputProcessor, "add", self._added)
        before(OutputProcessor, "process", self._returned)

    def _started(self, frontend: Frontend, *_: Any) -> None:
        number = next(self._numbers)
        self.by_processor[frontend.processor] = Engine(frontend, lambda features: self._tell(number, features))

    def _asked(self, processor: Processor, request: Any, *_: Any) -> None:
        if (engine := self.by_processor.get(processor)) is not None:
            engine.asked(request.core_requests)
            self._by_request[id(request)] = request, engine

    def _added(self, outputs: OutputProcessor, _: Any, request: Any) -> None:
        if (known := self._by_request.pop(id(request), None)) is not None:
            self._by_outputs[outputs] = known[1]

    def _returned(self, outputs: OutputProcessor, new: list[EngineCoreOutput]) -> None:
        if (engine := self._by_outputs.get(outputs)) is not None:
            engine.returned(new)


def after(owner: type, name: str, seen: Callable[..., None]) -> None:
    """Call seen(self, result, *arguments) after each call of a method."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        seen(self, result, *arguments)
        return result

    setattr(owner, name, watched)


def before(owner: type, name: str, seen: Callable[..., None]) -> None:
    """Call seen(self, *arguments) before each call of a method."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        seen(self, *arguments)
        return method(self, *arguments, **named)

    setattr(owner, name, watched)


def watch_into(folder: Path) -> None:
    """Watch the engines of this process, and write what they have to a file that has the number of the process."""
    file = (folder / str(os.getpid())).open("a", encoding="utf-8", buffering=1)
    Watcher(lambda number, features: print(json.dumps([number, sorted(features)]), file=file))
