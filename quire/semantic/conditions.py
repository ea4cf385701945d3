"""The conditions of rules as tests: each returns why it holds, as names and values to show, or None if it does not."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from quire.semantic.classifier import Classifier
from quire.semantic.embedder import Vector
from quire.semantic.prompt import Said
from quire.semantic.rules import Conditions


@dataclass(frozen=True)
class Request:
    """What conditions are tested on. model: as requested. vector, language: of the text, if a rule needs them and
    there is a text; otherwise None and ""."""

    said: Said
    model: str | None
    api_key: bytes
    vector: Vector | None
    language: str


Reasons = dict[str, str]
Test = Callable[[Request], Reasons | None]


def tests_of(when: Conditions, examples: Vector | None, classifiers: Mapping[str, Classifier]) -> tuple[Test, ...]:
    """Return the tests of a rule, the cheapest first. examples: the embeddings of similar_to, [examples, width]."""
    return (*_tests_of_form(when), *_tests_of_text(when, examples, classifiers))


def _tests_of_form(when: Conditions) -> Iterator[Test]:
    if (least := when.min_chars) is not None:
        yield lambda request: _if(request.said.chars >= least)
    if (most := when.max_chars) is not None:
        yield lambda request: _if(request.said.chars <= most)
    if when.tools is not None:
        yield lambda request: _if(request.said.tools == when.tools)
    if when.media is not None:
        yield lambda request: _if(request.said.media == when.media)
    if when.requested_models:
        yield lambda request: _if(request.model in when.requested_models)
    if when.api_keys_sha256:
        yield lambda request: _if(sha256(request.api_key).hexdigest() in when.api_keys_sha256)


def _tests_of_text(when: Conditions, examples: Vector | None, classifiers: Mapping[str, Classifier]) -> Iterator[Test]:
    if when.languages:
        yield lambda request: _if(request.language in when.languages, language=request.language)
    if when.keywords:
        yield _has_word(when.keywords)
    if examples is not None:
        yield _is_similar(examples, when.similarity)
    if when.labels:
        yield _has_label(classifiers[when.classifier], when.labels, when.probability)


def _if(holds: bool, **reasons: str) -> Reasons | None:
    return reasons if holds else None


def _has_word(keywords: tuple[str, ...]) -> Test:
    """The pattern has literal alternatives only, so it takes linear time."""
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, keywords)) + r")(?!\w)", re.IGNORECASE)

    def test(request: Request) -> Reasons | None:
        found = pattern.search(request.said.text)
        return None if found is None else {"keyword": found.group().lower()}

    return test


def _is_similar(examples: Vector, least: float) -> Test:
    def test(request: Request) -> Reasons | None:
        if request.vector is None:
            return None
        similarity = float((examples @ request.vector).max())
        return _if(similarity >= least, similarity=f"{similarity:.3f}")

    return test


def _has_label(classifier: Classifier, labels: tuple[str, ...], least: float) -> Test:
    def test(request: Request) -> Reasons | None:
        if request.vector is None:
            return None
        probabilities = classifier.probabilities(request.vector)
        label = max(labels, key=probabilities.__getitem__)
        return _if(probabilities[label] >= least, label=label, probability=f"{probabilities[label]:.3f}")

    return test
