"""`quire serve` with several models, as people start it."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import quire.demo
from quire.cli.main import main
from support.many_models import copy_model
from support.server import eventually
from support.server_process import Server

DEMO = Path(quire.demo.__file__).parent
MODELS = """
[defaults]
max-num-seqs = 8

[models.small]
model = "here"
aliases = ["gpt-x"]
max-model-len = 256
kv-cache-memory-bytes = "32M"

[models.vision]
model = "quire-demo/vision"
ttl = "10m"

[models.quire-demo]
"""


@pytest.mark.slow
def test_models_of_a_file_are_served_until_a_signal(tmp_path: Path):
    copy_model(DEMO / "model", tmp_path / "here")
    (tmp_path / "models.toml").write_text(MODELS)
    options = ["--models", str(tmp_path / "models.toml"), "--memory", "4G", "--drain-timeout", "600"]
    with Server(*options) as server, ThreadPoolExecutor(4) as pool:
        client = server.client
        assert [card["id"] for card in client.get("/v1/models").json["data"]] == [
            "small",
            "gpt-x",
            "vision",
            "quire-demo",
        ]
        [text, _] = pool.map(
            lambda model: client.complete("Once", model=model, max_tokens=4)["choices"][0]["text"], ["gpt-x", "vision"]
        )
        assert client.complete("Once", max_tokens=4)["choices"][0]["text"] == text
        [small] = [card for card in client.get("/v1/models").json["data"] if card["id"] == "small"]
        assert (small["max_model_len"], small["root"]) == (256, str(tmp_path / "here"))
        long = {"model": "vision", "max_tokens": 800, "ignore_eos": True}
        running = pool.submit(client.complete, "1 1 1", **long)
        eventually(lambda: client.get("/load").json["server_load"] == 1)
        waiting = pool.submit(client.post, "/v1/completions", {"model": "quire-demo", "prompt": "a"})
        eventually(lambda: client.get("/models").json["data"][2]["status"]["value"] == "loading" or waiting.done())
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert len(running.result()["choices"]) == 1  # it had time to finish
        assert waiting.result().status in (200, 503)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    assert "[small] Loaded in" in server.log
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_models_of_a_folder_are_served_with_the_default_options(tmp_path: Path):
    copy_model(DEMO / "model", tmp_path / "one")
    (tmp_path / "notes.txt").write_text("not a model")
    with Server("--models-dir", str(tmp_path), "--memory", "2G", "--max-loaded-models", "1") as server:
        client = server.client
        assert client.complete("Once", max_tokens=4, model="one")["usage"]["completion_tokens"] == 4
        entry = client.get("/models").json["data"][0]
        assert 200 << 20 < entry["memory"] < 2 << 30  # with a KV cache of what was left
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["quire-demo", "quire-demo/vision", "--api-server-count", "2"], "several models and --api-server-count"),
        (["quire-demo", "quire-demo/vision", "--served-model-name", "a"], "several models and --served-model-name"),
        (["--models", "missing.toml"], "missing.toml"),
        (["--models-dir", "missing"], "there is no folder missing"),
        (["quire-demo", "./missing"], "./missing"),
        (["--pulled-models", "--model-wait", "0"], "--model-wait"),
    ],
)
def test_what_cannot_be_served_is_an_error_at_start(arguments, problem, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--port", "0", *arguments]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[models", "not valid TOML"),
        ("x = 1", r"should have a table \[models.NAME\]"),
        ("[models.a]\nmodel = 1", "a text as model"),
        ("[models.a]\naliases = 'b'", "a list of names"),
        ("[models.quire-demo]\nttl = 'soon'", "5m or 1h30m"),
        ("[models.quire-demo]\nport = 1", "port is an option of the whole server"),
        ("[models.quire-demo]\nnothing = 1", "nothing"),
    ],
)
def test_a_wrong_file_is_an_error_at_start(text, problem, tmp_path: Path, capsys):
    path = tmp_path / "models.toml"
    path.write_text(text)
    assert main(["serve", "--port", "0", "--models", str(path)]) == 1
    assert re.search(problem, capsys.readouterr().err)
