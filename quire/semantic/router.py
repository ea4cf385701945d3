"""The semantic router: chooses a model and its settings for a request by what the request says."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from quire.config.engine import ConfigError
from quire.messages.errors import EngineDeadError, error_text
from quire.observability.logging import logger
from quire.platform.extras import install_command
from quire.platform.untrusted.limits import BusyError
from quire.semantic.cache import Answer, Hit, SemanticCache, cache_key
from quire.semantic.classifier import Classifier
from quire.semantic.conditions import Reasons, Request, Test, tests_of
from quire.semantic.embedder import Embedder, Vector
from quire.semantic.prompt import APIS, Api, said, without_last_text
from quire.semantic.rewriting import rewritten
from quire.semantic.rules import Action, Rules

MAX_BODY = 8 << 20  # bytes; larger bodies are not parsed, since other requests would wait
EMBEDDING_SECONDS = 2.0
_DEFAULT = "default"


@dataclass
class Decision:
    """What happens to a request.

    is_chosen: whether a rule or the default names the model, and not only the client.
    body: the body to send. rule: the name of the rule, or "default". because: what made the rule apply, such as a
    similarity. hit: an answer from the cache, which makes the rest unnecessary. remember: stores the answer in the
    cache; None if it is not cached. seconds: the time of the decision.
    """

    body: bytes
    rule: str
    action: Action
    model: str | None
    is_chosen: bool
    because: Reasons
    seconds: float = 0.0
    hit: Hit | None = None
    remember: Callable[[Answer], None] | None = None

    @property
    def header(self) -> str:
        """The value of the response's header X-Quire-Route."""
        parts = {"rule": self.rule, "model": self.model or "", "tag": self.action.tag or "", **self.because}
        if self.hit is not None:
            parts["cache"] = f"{self.hit.similarity:.3f}"
        shown = [f"{name}={_printable(value)}" for name, value in parts.items() if value]
        return "; ".join([*shown, f"ms={self.seconds * 1000:.1f}"])


class _Rule(NamedTuple):
    name: str
    tests: tuple[Test, ...]
    then: Action

    def reasons(self, request: Request) -> Reasons | None:
        """Return why the rule applies, or None if it does not."""
        because: Reasons = {}
        for test in self.tests:
            found = test(request)
            if found is None:
                return None
            because |= found
        return because


class SemanticRouter:
    """Use `start` to create one, and `close` at the end."""

    def __init__(
        self,
        rules: Rules,
        embedder: Embedder | None,
        classifiers: dict[str, Classifier],
        examples: dict[str, Vector],
        detect: Callable[[str], str] | None,
    ) -> None:
        """examples: the embeddings of each rule's examples, by the rule's name. detect: returns a text's language."""
        self.rules = rules
        self._embedder = embedder
        self._detect = detect
        self._rules = [
            _Rule(rule.name, tests_of(rule.when, examples.get(rule.name), classifiers), rule.then)
            for rule in rules.rule
        ]
        self.cache = SemanticCache(rules.cache) if rules.cache.enabled else None

    @classmethod
    async def start(cls, rules: Rules) -> Self:
        """Load the embedding model and embed the examples. Raises ConfigError if something does not fit."""
        classifiers = {given.name: Classifier.read(given.file) for given in rules.classifier}
        for rule in rules.rule:
            unknown = set(rule.when.labels) - set(classifiers[rule.when.classifier].labels if rule.when.labels else ())
            if unknown:
                raise ConfigError(f"rule {rule.name}: {rule.when.classifier} has no label {min(unknown)!r}")
        detect = _language_detector() if rules.needs_languages else None
        if not rules.needs_embeddings:
            return cls(rules, None, classifiers, {}, detect)
        assert rules.embedding is not None
        embedder = await Embedder.start(rules.embedding)
        try:
            width = len(await embedder.embed("a"))
            for name, classifier in classifiers.items():
                if classifier.weight.shape[1] != width:
                    raise ConfigError(
                        f"classifier {name} is for embeddings with {classifier.weight.shape[1]} numbers, and those of "
                        f"{rules.embedding.model} have {width}"
                    )
            examples = {
                rule.name: np.stack(await asyncio.gather(*map(embedder.embed, rule.when.similar_to)))
                for rule in rules.rule
                if rule.when.similar_to
            }
        except BaseException:
            await embedder.close()
            raise
        return cls(rules, embedder, classifiers, examples, detect)

    async def close(self) -> None:
        if self._embedder is not None:
            await self._embedder.close()

    async def decide(self, path: str, body: bytes, api_key: bytes = b"") -> Decision | None:
        """Return what happens to a request, or None if the rules do not apply to it."""
        began = time.perf_counter()
        api = APIS.get(path)
        fields = None if api is None or len(body) > MAX_BODY else _parsed(body)
        if api is None or fields is None:
            return None
        model = fields.get("model")
        if not self.rules.apply_to(model if isinstance(model, str) else None):
            return None
        request = await self._read(api, fields, model, api_key)
        decision = self._choose(api, fields, request)
        if self.cache is not None and decision.action.refuse is None:
            self._look_up(self.cache, api, path, decision, request)
        decision.seconds = time.perf_counter() - began
        return decision

    async def _read(self, api: Api, fields: dict[str, Any], model: Any, api_key: bytes) -> Request:
        what = said(api, fields)
        vector = await self._vector(what.text)
        language = self._detect(what.text) if self._detect is not None and what.text.strip() else ""
        return Request(what, model if isinstance(model, str) else None, api_key, vector, language)

    async def _vector(self, text: str) -> Vector | None:
        """Return the embedding of a text, or None if there is none in time."""
        if self._embedder is None or not text.strip():
            return None
        try:
            async with asyncio.timeout(EMBEDDING_SECONDS):
                return await self._embedder.embed(text)
        except (TimeoutError, EngineDeadError, ValueError, BusyError) as error:
            logger.error("No embedding for a request, so rules that need one do not apply to it: %s", error_text(error))
            return None

    def _choose(self, api: Api, fields: dict[str, Any], request: Request) -> Decision:
        for rule in self._rules:
            because = rule.reasons(request)
            if because is not None:
                return self._decision(api, fields, rule.name, rule.then, because)
        return self._decision(api, fields, _DEFAULT, Action(), {})

    def _decision(self, api: Api, fields: dict[str, Any], name: str, action: Action, because: Reasons) -> Decision:
        given = fields.get("model")
        is_open = isinstance(given, str) and given in self.rules.models
        model = action.model or (self.rules.default_model if is_open or given is None else None)
        body = msgspec.json.encode(rewritten(api, fields, action, model))
        shown = model or (given if isinstance(given, str) else None)
        return Decision(body, name, action, shown, model is not None, because)

    def _look_up(self, cache: SemanticCache, api: Api, path: str, decision: Decision, request: Request) -> None:
        fields = _parsed(decision.body)
        rest = None if fields is None else without_last_text(api, fields)
        if rest is None or request.vector is None:
            return
        vector = request.vector
        key = cache_key(path, rest, request.api_key)
        decision.hit = cache.find(key, vector)
        if decision.hit is None:
            decision.remember = lambda answer: cache.add(key, vector, answer)


def _parsed(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a JSON object, or None if it is none: the server will refuse it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _language_detector() -> Callable[[str], str]:
    try:
        import py3langid
    except ModuleNotFoundError as error:
        raise ConfigError(f"rules with languages need py3langid: {install_command('semantic')}") from error

    def detect(text: str) -> str:
        return str(py3langid.classify(text[:2000])[0])

    return detect


def _printable(value: str) -> str:
    return "".join(char if char.isascii() and char.isprintable() and char != ";" else "_" for char in value[:100])
