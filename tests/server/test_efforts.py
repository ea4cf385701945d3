"""--reasoning-effort-map: templates get other degrees than requests name."""

from __future__ import annotations

import pytest

from quire.config.engine import ConfigError, EngineConfig
from quire.engine.frontend import Frontend
from quire.models.heads.resolve import with_files
from quire.server.protocol import ChatRequest
from quire.server.rendering import _begin

TEMPLATE = "{% for m in messages %}{{ reasoning_effort }} {{ enable_thinking }}{% endfor %}"


@pytest.mark.parametrize(
    ("effort", "rendered"),
    [("xhigh", "high True"), ("low", "low True"), ("minimal", "none False"), ("none", "none False"), (None, " ")],
)
def test_efforts_are_replaced(effort: str | None, rendered: str):
    efforts = {"xhigh": "high", "minimal": "none"}
    config = EngineConfig.create(chat_template=TEMPLATE, reasoning_effort_map=efforts)
    body = ChatRequest(messages=[{"role": "user", "content": "a"}], reasoning_effort=effort)
    _, prompt = _begin(Frontend(*with_files(config), in_process=True), body.messages, body, None)
    assert prompt == rendered


def test_values_that_are_no_texts_are_refused():
    with pytest.raises(ConfigError, match=r"reasoning_effort_map must be of type dict\[str, str\]"):
        EngineConfig.create(reasoning_effort_map={"low": 1})
