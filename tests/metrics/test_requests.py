"""The log lines of --enable-log-requests."""

from __future__ import annotations

import logging

import pytest

from quire.messages.sampling_params import SamplingParams
from quire.metrics.requests import MAX_PARAMETERS, RequestLog, RequestRecord, SequenceRecord


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", "quire")
    return caplog


def test_a_request_is_logged_with_the_parameters_that_are_no_defaults(log: pytest.LogCaptureFixture):
    RequestLog(enabled=True).received("r1", "a secret", [1, 2, 3], SamplingParams(temperature=0.5, stop=["x"]))
    [message] = log.messages
    assert message.startswith("Request r1 received: 3 prompt tokens, ")
    assert "temperature=0.5" in message
    assert "stop=['x']" in message
    assert "top_p" not in message
    assert "secret" not in log.text


def test_prompts_are_logged_at_level_debug_only_and_cut(log: pytest.LogCaptureFixture):
    log.set_level("DEBUG", "quire")
    RequestLog(enabled=True, max_length=2).received("r1", "abcdef", [1, 2, 3], SamplingParams())
    assert log.messages[1] == "Request r1: prompt 'ab', token ids [1, 2]"


def test_long_parameters_are_cut_and_cannot_forge_lines(log: pytest.LogCaptureFixture):
    RequestLog(enabled=True).received("r1", None, [1], SamplingParams(stop=["\n12:00 ERROR lost" * 500]))
    [message] = log.messages
    assert len(message) < MAX_PARAMETERS + 100
    assert message.isprintable()


@pytest.mark.parametrize(("first", "said"), [(1.25, "first token after 0.250 s"), (0.0, "no token")])
def test_the_end_of_a_sequence_is_logged(log: pytest.LogCaptureFixture, first: float, said: str):
    sequence = SequenceRecord(RequestRecord(1, 1), 10, 7, 1.0, first_token_at=first, num_tokens=7, num_cached_tokens=4)
    RequestLog(enabled=True).ended("r1", "stop", sequence, 2.5)
    assert log.messages == [f"Request r1 ended (stop): 10 prompt tokens (4 cached), 7 generated; {said}, 1.50 s in all"]


def test_nothing_is_logged_unless_it_is_asked_for(log: pytest.LogCaptureFixture):
    silent = RequestLog(enabled=False)
    silent.received("r1", "a", [1], SamplingParams())
    silent.ended("r1", "stop", SequenceRecord(RequestRecord(1, 1), 1, 1, 0.1), 0.2)
    assert not log.messages
