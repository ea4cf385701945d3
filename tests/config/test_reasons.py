"""Every reason in quire/config/vllm.toml and vllm_refused.toml is true, and every option does what the tables say."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator

import pytest

from quire.config.engine import ConfigError, EngineConfig
from quire.config.vllm import NO_EFFECT, NOT_SUPPORTED, SPECULATIVE_NO_EFFECT, SPECULATIVE_NOT_SUPPORTED, Foreign
from support import option_claims, server_claims
from support.claims import TESTS, Parts, by_tests

ELSEWHERE = tomllib.loads((TESTS / "data" / "option_claims.toml").read_text())
CHECKS = option_claims.CHECKS | server_claims.CHECKS | {claim: by_tests(*tests) for claim, tests in ELSEWHERE.items()}
TABLES = (NO_EFFECT, NOT_SUPPORTED, SPECULATIVE_NO_EFFECT, SPECULATIVE_NOT_SUPPORTED)
REASONS: dict[str, set[str]] = {}  # by claim
for table in TABLES:
    for foreign in table.values():
        REASONS.setdefault(foreign.claim, set()).add(foreign.reason)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    parts = Parts(tmp_path_factory.mktemp("claims"))
    yield parts
    parts.close()


@pytest.mark.parametrize("claim", sorted(REASONS))
def test_a_reason_is_true(claim: str, parts: Parts):
    assert claim in CHECKS, (
        f"No check for the claim {claim!r} ({'; '.join(REASONS[claim])}). Add a function with @CHECKS.of({claim!r}) to "
        "tests/support/option_claims.py or server_claims.py that runs what the reason says, or name the tests that do "
        "in tests/data/option_claims.toml."
    )
    CHECKS[claim](parts)


def test_there_is_no_check_without_a_reason():
    assert sorted(set(CHECKS) - set(REASONS)) == []


def given(foreign: Foreign) -> object:
    """A value that asks for something."""
    return True if foreign.switch else "something"


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_an_option_that_is_not_supported_is_an_error_with_its_reason(name: str):
    foreign = NOT_SUPPORTED[name]
    with pytest.raises(ConfigError) as raised:
        EngineConfig.create(**{name: given(foreign)})
    assert foreign.reason in str(raised.value)
    for value in foreign.accepted or ():
        assert EngineConfig.create(**{name: value}) == EngineConfig.create()


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_an_option_without_effect_changes_nothing_and_says_why(name: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "quire"):
        assert EngineConfig.create(**{name: given(NO_EFFECT[name])}) == EngineConfig.create()
    assert caplog.messages == [f"{name} has no effect: {NO_EFFECT[name].reason}"]


def test_fields_of_the_speculative_config_do_what_the_tables_say(caplog: pytest.LogCaptureFixture):
    plain = EngineConfig.create(speculative_config=DRAFTS)
    for name, foreign in SPECULATIVE_NO_EFFECT.items():
        caplog.clear()
        assert EngineConfig.create(speculative_config={**DRAFTS, name: 3}) == plain
        assert foreign.reason in caplog.text
    for name, foreign in SPECULATIVE_NOT_SUPPORTED.items():
        with pytest.raises(ConfigError) as raised:
            EngineConfig.create(speculative_config={**DRAFTS, name: 3})
        assert foreign.reason in str(raised.value)
