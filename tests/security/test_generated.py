"""Generated attacks on `quire serve`: each is answered or refused, other clients' streams go on, and nothing is kept.

The environment variable ATTACKS has their number: 300 unless it is set, and 20,000 in .ci/nightly. All seeds are fixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from quire.checkpoints.hub import local_model
from quire.lora.files import CONFIG
from quire.multimodal.decoding import Kind
from support.attack_variants import ADAPTER_FIELDS, CONSTRAINTS, TEMPLATES, damaged, heads
from support.attacks import attack as attack_together
from support.attacks import body, check_refused, steady_memory, witness
from support.edge import until_closed
from support.media_bombs import data_url
from support.server import Answer, Client
from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

ATTACKS = int(os.environ.get("ATTACKS", "300"))
CHAT = [{"role": "user", "content": "Hello"}]
STATUSES = (400, 408, 413, 415, 422, 431, 503)


class Target:
    """A server that a test attacks, with the folder of its adapters."""

    def __init__(self, client: Client, adapters: Path) -> None:
        self.client, self._adapters, self._numbers = client, adapters, count()
        self._adapter = local_model("quire-demo/rhyme")
        assert self._adapter is not None
        self._config = json.loads((self._adapter / CONFIG).read_text())

    def constrain(self, constraint: dict[str, Any]) -> None:
        answer = self._post("/v1/completions", {**body(**constraint), "max_tokens": 24, "temperature": 1, "seed": 1})
        if answer.status == 500:  # the grammar grew too large while its text was generated
            assert "request failed" in answer.error["message"]
        else:
            check_answered(answer)

    def render(self, template: str) -> None:
        check_answered(self._chat(CHAT, chat_template=template))

    def show(self, file: tuple[Kind, bytes]) -> None:
        kind, data = file
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(data, f"{kind}/x")}}
        check_answered(self._chat([{"role": "user", "content": [part]}]))

    def connect(self, head: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.client.port), timeout=LONGEST) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(head)
                raw.shutdown(socket.SHUT_WR)
            answer = until_closed(raw)
        assert not answer.startswith(b"HTTP/1.1 5")

    def load(self, fields: dict[str, Any]) -> None:
        name = str(next(self._numbers))
        shutil.copytree(self._adapter, self._adapters / name)
        (self._adapters / name / CONFIG).write_text(json.dumps(self._config | fields))
        answer = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})
        if answer.status == 200:
            assert self._post("/v1/unload_lora_adapter", {"lora_name": name}).status == 200
        else:
            check_refused(answer, *STATUSES)
        shutil.rmtree(self._adapters / name)

    def _chat(self, messages: list[dict[str, Any]], **fields: Any) -> Answer:
        return self._post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, **fields})

    def _post(self, path: str, content: Any) -> Answer:
        return self.client.post(path, content)


def check_answered(answer: Answer) -> None:
    if answer.status != 200:
        check_refused(answer, *STATUSES)


KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Target, Any], None]]] = {
    "constraints": (CONSTRAINTS, Target.constrain),
    "templates": (TEMPLATES, Target.render),
    "media": (damaged(), Target.show),
    "heads": (heads(b"/v1/completions"), Target.connect),
    "adapters": (ADAPTER_FIELDS, Target.load),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Target]]:
    adapters = tmp_path_factory.mktemp("adapters")
    options = """
        --model quire-demo/vision --max-model-len 512 --max-num-seqs 4 --kv-cache-memory-bytes 64M --enable-lora
        --max-lora-rank 8 --enable-admin-api --trust-request-chat-template
    """.split()
    with Server(*options, "--lora-folder", str(adapters)) as server:
        target = Target(server.client, adapters)

        def attack_a_little() -> None:
            for kind in KINDS:
                attack(target, kind, 5)

        with steady_memory(attack_a_little):
            yield server, target


def attack(target: Target, kind: str, number: int) -> None:
    variants, send = KINDS[kind]

    @seed(46)
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(variants)
    def check(variant: Any) -> None:
        send(target, variant)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_no_generated_attack_harms_the_server(server: tuple[Server, Target], kind: str) -> None:
    subject, target = server
    with witness(target.client):
        attack(target, kind, ATTACKS // len(KINDS))
    assert subject.metric("engine_restarts_total") == 0
    assert "Traceback" not in subject.log
    subject.wait_until_idle()


@pytest.mark.parametrize("template", ["{{ 'ab c' * 4000000 }}", "{{ 'a ' * 60000 }}"])
def test_a_template_that_makes_a_large_prompt_is_refused(server: tuple[Server, Target], template: str) -> None:
    _, target = server
    chat = {"messages": CHAT, "chat_template": template}
    with witness(target.client):
        for answer in attack_together(target.client, "/v1/chat/completions", [{**chat, "max_tokens": 2}] * 4):
            message = check_refused(answer, 400, 503)
            assert answer.status == 503 or "max_model_len" in message
