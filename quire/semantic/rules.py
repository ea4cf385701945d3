"""The file of a semantic router: rules, each with conditions and an action, and what they need."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from quire.config.engine import ConfigError
from quire.messages.errors import error_text

MAX_EXAMPLES = 1000  # of all rules together; each request is compared with all of them
_KEY_HASH = re.compile(r"[0-9a-f]{64}")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Conditions(_Table, frozen=True):
    """The conditions of a rule. All that are given must hold; a rule without conditions always applies.

    similar_to: examples; one of them must have a cosine similarity of at least `similarity` with the request's text.
    classifier, labels: the name of a classifier, and the labels of which one must have a probability of at least
    `probability`. keywords: words of which the text contains at least one, in any case. min_chars, max_chars: limits
    for the length of all texts of the request. tools, media: whether it must have tools, or pictures, sounds or videos,
    or must not have them. languages: ISO 639-1 codes of the text's language. api_keys_sha256: SHA-256 hashes, in
    hexadecimal, of the API keys with which a request may be sent. requested_models: the names of models in requests.
    """

    similar_to: tuple[str, ...] = ()
    similarity: float = 0.5
    classifier: str = ""
    labels: tuple[str, ...] = ()
    probability: float = 0.5
    keywords: tuple[str, ...] = ()
    min_chars: int | None = None
    max_chars: int | None = None
    tools: bool | None = None
    media: bool | None = None
    languages: tuple[str, ...] = ()
    api_keys_sha256: tuple[str, ...] = ()
    requested_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("similarity", "probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if bool(self.classifier) != bool(self.labels):
            raise ValueError("classifier and labels are given together")
        for name in ("similar_to", "labels", "keywords", "languages", "requested_models"):
            if not all(getattr(self, name)):
                raise ValueError(f"{name} contains an empty text")
        if not all(_KEY_HASH.fullmatch(value) for value in self.api_keys_sha256):
            raise ValueError("api_keys_sha256 must contain SHA-256 hashes of 64 hexadecimal digits")


class Sampling(_Table, frozen=True):
    """Sampling parameters for requests that do not give them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class Action(_Table, frozen=True):
    """What a rule does with a request.

    model: the name of a model or of a LoRA adapter. reasoning: whether the model thinks before it answers.
    reasoning_effort: for models that have several degrees. system_prompt: precedes the request's own. sampling: for
    parameters that the request leaves open. cache_salt: separates the prefix cache of these requests, if they have no
    salt themselves. refuse: the message of the error with which the request is refused. tag: a word in the response's
    header X-Quire-Route, the log and the trace.
    """

    model: str | None = None
    reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    system_prompt: str | None = None
    sampling: Sampling = Sampling()
    cache_salt: str | None = None
    refuse: str | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        if self.reasoning is not None and self.reasoning_effort is not None:
            raise ValueError("reasoning and reasoning_effort cannot be given together")
        if self.tag is not None and not re.fullmatch(r"[\w.-]{1,64}", self.tag, re.ASCII):
            raise ValueError(f"tag must consist of at most 64 letters, digits, dots and hyphens, got {self.tag!r}")


class Rule(_Table, frozen=True):
    """A rule. name: at most 64 letters, digits, dots and hyphens."""

    name: str
    when: Conditions = Conditions()
    then: Action = Action()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]{1,64}", self.name, re.ASCII):
            raise ValueError(f"name must consist of at most 64 letters, digits, dots and hyphens, got {self.name!r}")


class Embedding(_Table, frozen=True):
    """The embedding model. options: engine options, as for `LLM`. max_tokens: texts are shortened to this length."""

    model: str
    max_tokens: int = 256
    options: dict[str, Any] = {}  # msgspec copies it

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


class Classifier(_Table, frozen=True):
    """A trained head over embeddings. file: as `quire route train` writes it, or the name of a shipped one."""

    name: str
    file: str


class Cache(_Table, frozen=True):
    """Answers to previous requests, for requests that differ only in their last text, and in that only slightly.

    similarity: the least cosine similarity of the two texts. Times are in seconds.
    """

    enabled: bool = False
    similarity: float = 0.95
    ttl: float = 3600.0
    max_entries: int = 1000
    max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 < self.similarity <= 1:
            raise ValueError(f"similarity must be above 0 and at most 1, got {self.similarity}")
        for name in ("ttl", "max_entries", "max_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")


class Rules(_Table, frozen=True):
    """The whole file. The first rule whose conditions hold determines what happens; without one, nothing does.

    models: the names in requests to which the rules apply; "*" means all. default_model: the model of requests with one
    of these names if no rule names one.
    """

    models: tuple[str, ...] = ("auto",)
    default_model: str | None = None
    embedding: Embedding | None = None
    classifier: tuple[Classifier, ...] = ()
    cache: Cache = Cache()
    rule: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.rule]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two rules have the name {name!r}")
        known = [classifier.name for classifier in self.classifier]
        for rule in self.rule:
            if (wanted := rule.when.classifier) and wanted not in known:
                raise ValueError(f"rule {rule.name}: there is no classifier {wanted!r}")
        if self.embedding is None and self.needs_embeddings:
            raise ValueError("similar_to, classifiers and the cache need a model in [embedding]")
        if sum(len(rule.when.similar_to) for rule in self.rule) > MAX_EXAMPLES:
            raise ValueError(f"all rules together may have {MAX_EXAMPLES} examples in similar_to")

    @property
    def needs_embeddings(self) -> bool:
        return self.cache.enabled or any(rule.when.similar_to or rule.when.classifier for rule in self.rule)

    @property
    def needs_languages(self) -> bool:
        return any(rule.when.languages for rule in self.rule)

    def apply_to(self, model: str | None) -> bool:
        return "*" in self.models or model in self.models

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError if the file cannot be read or contains a mistake; the message names the field."""
        try:
            return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), cls)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}: {error_text(error)}") from error
