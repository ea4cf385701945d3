"""Which features the engines of tests really had enabled together: `pytest --record-features` adds it to a file.

An engine has a feature if its options, its model, one of its requests or one of its outputs has it. So a pair of
features is recorded for a test if one engine had both while the test ran. Engines in processes of their own are seen
by what they are asked and what they return; those of servers that a test starts as commands are not seen.

Nothing is watched without the option.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from functools import wraps
from itertools import combinations
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from quire.config import features as f
from quire.config.features import Feature, Setup
from quire.engine.frontend import Frontend
from quire.engine.llm import LLM
from quire.engine.output_processor import OutputProcessor
from quire.engine.processor import Processor
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest
from quire.models.description import describe

TESTS = Path(__file__).parents[1]
RECORD = TESTS / "data" / "combinations.json"
MOST_FILES = 3  # of a pair; more would be hard to read
Combinations = dict[str, dict[str, list[str]]]  # by the first and the second feature of a pair: test files


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
    """What one engine has. seen: in the test that runs."""

    def __init__(self, frontend: Frontend) -> None:
        config = frontend.config
        setup = Setup(config, model=describe(frontend.directory, config.model).facts)
        self.own = {name for name, is_on in OF_ENGINES.items() if is_on(setup)}
        tokens = config.scheduler.tokens_of_a_step(gpu=False)
        self.longest_chunk = min(config.scheduler.long_prefill_token_threshold or tokens, tokens)
        self.seen: set[str] = set()

    def asked(self, requests: Iterable[EngineCoreRequest]) -> None:
        for request in requests:
            self.seen |= self.own
            self.seen.update(name for name, is_on in OF_REQUESTS.items() if is_on(request))
            if len(request.prompt_token_ids) > self.longest_chunk and "whole prompts" not in self.own:
                self.seen.add("chunked prefill")

    def returned(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            self.seen.update(name for name, is_on in OF_OUTPUTS.items() if is_on(output))


class Recorder:
    """In each process that runs tests. Reports carry what it saw to the process that prints."""

    def __init__(self) -> None:
        self.by_processor: WeakKeyDictionary[Processor, Engine] = WeakKeyDictionary()
        self.by_outputs: WeakKeyDictionary[OutputProcessor, Engine] = WeakKeyDictionary()
        # Of the test that runs: engines, and requests by their ids, which are kept alive.
        self.engines: dict[int, Engine] = {}
        self.by_request: dict[int, tuple[Any, Engine]] = {}
        _after(Frontend, "__init__", self._started)
        _after(Processor, "process", self._asked)
        _after(OutputProcessor, "add", self._added)
        _before(OutputProcessor, "process", self._returned)
        _before(LLM, "beam_search", self._beams)

    def _started(self, frontend: Frontend, *_: Any) -> None:
        self.by_processor[frontend.processor] = Engine(frontend)

    def _asked(self, processor: Processor, request: Any, *_: Any) -> None:
        if (engine := self.by_processor.get(processor)) is not None:
            engine.asked(request.core_requests)
            self.engines[id(engine)] = engine
            self.by_request[id(request)] = request, engine

    def _added(self, outputs: OutputProcessor, _: Any, request: Any) -> None:
        if id(request) in self.by_request:
            self.by_outputs[outputs] = self.by_request[id(request)][1]

    def _returned(self, outputs: OutputProcessor, new: list[EngineCoreOutput]) -> None:
        if (engine := self.by_outputs.get(outputs)) is not None:
            engine.returned(new)

    def _beams(self, llm: LLM, *_: Any) -> None:
        if (engine := self.by_processor.get(llm.processor)) is not None:
            engine.seen.add("beam search")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "call":
            engines = list(self.engines.values())
            report.user_properties.append(("features", [sorted(engine.seen) for engine in engines]))
            for engine in engines:
                engine.seen = set()
            self.engines.clear()
            self.by_request.clear()
        return report


def _after(owner: type, name: str, seen: Callable[..., None]) -> None:
    """Call seen(self, result, *arguments) after each call of a method."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        seen(self, result, *arguments)
        return result

    setattr(owner, name, watched)


def _before(owner: type, name: str, seen: Callable[..., None]) -> None:
    """Call seen(self, *arguments) before each call of a method."""
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        seen(self, *arguments)
        return method(self, *arguments, **named)

    setattr(owner, name, watched)


class Record:
    """In the process that prints: merges what passed tests combined into the file."""

    def __init__(self) -> None:
        self.found: dict[str, set[tuple[str, str]]] = defaultdict(set)  # pairs, by test file
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            file = report.nodeid.partition("::")[0]
            for name, value in report.user_properties:
                if name == "features":
                    for features in value:
                        self.found[file].update(combinations(sorted(features, key=FEATURES.index), 2))

    def pytest_sessionfinish(self) -> None:
        write(merged(read(), self.found))


def read() -> Combinations:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}  # type: ignore[no-any-return]


def merged(old: Combinations, found: dict[str, set[tuple[str, str]]]) -> Combinations:
    """The old pairs whose files and features are still there, and the new ones, each with few files."""
    files: dict[tuple[str, str], set[str]] = defaultdict(set)
    for first, others in old.items():
        for second, names in others.items():
            if {first, second} <= set(FEATURES):
                files[first, second] |= {name for name in names if (TESTS.parent / name).exists()}
    for file, pairs in found.items():
        for pair in pairs:
            files[pair].add(file)
    result: Combinations = {}
    for first, second in sorted(files, key=lambda pair: (FEATURES.index(pair[0]), FEATURES.index(pair[1]))):
        if names := sorted(files[first, second])[:MOST_FILES]:
            result.setdefault(first, {})[second] = names
    return result


def write(combinations_: Combinations) -> None:
    RECORD.write_text(json.dumps(combinations_, indent=1) + "\n", encoding="utf-8")


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record())
