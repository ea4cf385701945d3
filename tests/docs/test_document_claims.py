"""What the documents say to be refused, ignored or without effect is so: each sentence has a check.

tests/data/document_claims.toml has the checks. Most ask one engine or server, which all of them share.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.llm import LLM
from support.checkpoints import Checkpoints
from support.claims import TESTS, Parts, by_tests
from support.document_claims import CHECKS

DOCS = TESTS.parent / "docs"
TABLE = TESTS / "data" / "document_claims.toml"
_CLAIM = re.compile(
    r"\b(is|are|be|were) (not (yet )?(supported|allowed)|refused|ignored)\b|\b(has|have) no effect\b|without effect|"
    r"\b(is|are|were) rejected\b|"
    r"cannot be used|not there yet|\bis a 400\b|not supported\b|do(es)? not go together|does not support"
)
_DRAFTS = re.compile(r"\b[Dd]rafts?\b.*\brejected\b")  # of tokens, not of requests
_NO_SENTENCES = re.compile(r"^ *```.*?^ *```$|<!-- written.*?<!-- end -->|^#.*?$", re.DOTALL | re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """The sentences, items of lists and rows of tables that say what is refused, ignored or without effect."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*|] |\d+\. )", _NO_SENTENCES.sub("\n\n", text)):
        for sentence in re.split(r'(?<=[.!?;:]) (?=[A-Z`"\[(])', " ".join(paragraph.split())):
            if _CLAIM.search(sentence) and not _DRAFTS.search(sentence):
                yield sentence


CLAIMS = [
    (path.stem, sentence)
    for path in sorted([*DOCS.rglob("*.md"), DOCS.parent / "README.md"])
    if path.stem != "history"  # it is about what was
    for sentence in sentences(path.read_text(encoding="utf-8"))
]
ENTRIES: dict[str, list[dict[str, Any]]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
LISTS = {"1025 strings": ["x"] * 1025}  # values that are too long for the table


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[Parts]:
    parts = Parts(tmp_path_factory.mktemp("claims"), checkpoints.path)
    yield parts
    parts.close()


def entry_of(page: str, sentence: str) -> dict[str, Any] | None:
    return next((entry for entry in ENTRIES.get(page, ()) if entry["says"] in sentence), None)


@pytest.mark.parametrize(("page", "sentence"), CLAIMS, ids=[f"{page}: {text[:60]}" for page, text in CLAIMS])
def test_a_sentence_is_true(page: str, sentence: str, parts: Parts):
    entry = entry_of(page, sentence)
    assert entry is not None, (
        f"docs/{page}.md says {sentence!r}, and nothing checks it. Add an entry [[{page}]] to tests/data/{TABLE.name} "
        "whose `says` is a part of the sentence, and that has options, a request or tests which show that it is true."
    )
    assert len(entry) > 1, f"the entry of {sentence!r} has no check"
    for options in entry.get("refused", ()):
        names = "|".join(name for name in options if name not in ("model", "tensor_parallel_size"))
        with pytest.raises(ValueError, match=entry.get("error", names)):  # a ConfigError, or the error of a model
            start(options, parts)
    for options in entry.get("accepted", ()):
        EngineConfig.create(**with_files(options, parts))
    if "request" in entry:
        path, body = entry["request"]
        body = {name: LISTS.get(value, value) if isinstance(value, str) else value for name, value in body.items()}
        answer = parts.server.post(path, body)
        assert answer.status == entry.get("status", 400), answer.body
        assert entry.get("message", "") in answer.body.decode()
    if "check" in entry:
        CHECKS[entry["check"]](parts)
    by_tests(*entry.get("tests", ()))(parts)


def with_files(options: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """The options with a file in place of "FILE"."""
    if "FILE" in options.values():
        secret = parts.folder / "secret"
        secret.write_text("0" * 64)
        secret.chmod(0o600)
        return {name: str(secret) if value == "FILE" else value for name, value in options.items()}
    return options


def start(options: dict[str, Any], parts: Parts) -> None:
    """Read the options, and start an engine with them. model: a variant of the tests' checkpoints, or vision."""
    model = options.get("model")
    path = None if model is None else "quire-demo/vision" if model == "vision" else str(parts.checkpoint(model))
    given = {**with_files(options, parts), "model": path}
    EngineConfig.create(**given)
    LLM(**given, max_model_len=128, max_num_seqs=4)


def test_there_is_no_entry_without_a_sentence():
    unused = [
        (page, entry["says"])
        for page, entries in ENTRIES.items()
        for entry in entries
        if not any(name == page and entry["says"] in sentence for name, sentence in CLAIMS)
    ]
    assert unused == []
    assert {entry["check"] for entries in ENTRIES.values() for entry in entries if "check" in entry} == set(CHECKS)
    assert len(CLAIMS) > 60


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Some text. `a` is refused with a 400. More.", ["`a` is refused with a 400."]),
        ("- one\n- two has no effect\n", ["- two has no effect"]),
        ("| a | b |\n|---|---|\n| `x` | ignored: it has\nno effect |", ["| `x` | ignored: it has no effect |"]),
        ("```text\nit is refused\n```\n# It is refused\n", []),
        ("- with ```` ```json ````\n\n`b` has no effect.\n\n```json\n{}\n```\n", ["`b` has no effect."]),
    ],
)
def test_sentences_are_found(text: str, found: list[str]):
    assert list(sentences(text)) == found


def test_a_sentence_without_a_check_is_named():
    assert entry_of("serving", "Nothing is refused with such words.") is None
    assert Path(TABLE).name == "document_claims.toml"
