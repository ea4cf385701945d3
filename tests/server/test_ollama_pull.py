"""/api/pull and /api/delete of Ollama's API, with `quire pull` and `quire rm` and a stand-in for the hub."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.hub import bundled_model
from support.hub import COMMIT, Hub, hub_environment
from support.server import Answer, Host, Service, eventually

pytestmark = pytest.mark.slow  # each download is a process
MODEL, LARGE = "tiny/demo", "tiny/large"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repositories")
    for name in (MODEL, LARGE, "Qwen/Qwen3-0.6B", "new/kind", "tiny/other", "tiny/third"):
        shutil.copytree(bundled_model(), folder / name)
    with (folder / LARGE / WEIGHTS).open("wb") as file:
        file.truncate(40 << 20)  # the library writes it in several parts
    config = json.loads((folder / "new/kind/config.json").read_text())
    (folder / "new/kind/config.json").write_text(json.dumps({**config, "architectures": ["BrandNewForCausalLM"]}))
    return folder


@pytest.fixture
def hub(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(repositories) as hub:
        for name, value in hub_environment(hub.address, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = str(tmp_path_factory.mktemp("cache"))
    host = Host(dtype="float32", max_num_seqs=16, kv_cache_memory_bytes=64 << 20, download_dir=folder)
    yield host
    host.close()


@pytest.fixture
def cache(host: Host) -> Iterator[Path]:
    cache = Path(host.llm.config.model.download_dir)
    yield cache
    for path in cache.glob("models--*"):
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def admin(host: Host) -> Service:
    return host.serve(enable_admin_api=True)


def lines_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


def pull(service: Service, model: str, **fields) -> Answer:
    return service.post("/api/pull", {"model": model, **fields})


def delete(service: Service, model: str) -> Answer:
    return service.request("DELETE", "/api/delete", json.dumps({"model": model}).encode())


def snapshot(cache: Path, model: str = MODEL) -> Path:
    return cache / f"models--{model.replace('/', '--')}" / "snapshots" / COMMIT


def test_a_pull_reports_every_file_until_it_succeeds(admin, hub: Hub, cache: Path):
    first, *progress, verifying, last = lines_of(pull(admin, MODEL))
    assert first == {"status": "pulling manifest"}
    assert verifying == {"status": "verifying sha256 digest"}
    assert last == {"status": "success"}
    assert all(line["status"] == f"pulling {line['digest'][:12]}" for line in progress)
    sizes = {line["digest"]: line["total"] for line in progress}
    assert set(sizes.values()) == {path.stat().st_size for path in snapshot(cache).iterdir()}
    completed: dict[str, list[int]] = {}
    for line in progress:
        completed.setdefault(line["digest"], []).append(line["completed"])
    assert all(counts == sorted(set(counts)) for counts in completed.values())
    assert {digest: counts[-1] for digest, counts in completed.items()} == sizes
    # Again, and as one object, under the names that Ollama's clients use for models of the hub.
    hub.requests.clear()
    for name in (f"hf.co/{MODEL}", f"{MODEL}:latest"):
        assert pull(admin, name, stream=False).json == {"status": "success"}
    assert not hub.fetched()
    assert delete(admin, MODEL).status == 200
    assert not snapshot(cache).exists()
    assert delete(admin, MODEL).status == 404


def test_short_names_are_pulled_and_deleted(admin, hub: Hub, cache: Path):
    assert pull(admin, "qwen3:0.6b", stream=False).json == {"status": "success"}
    assert snapshot(cache, "Qwen/Qwen3-0.6B").exists()
    assert delete(admin, "qwen3:0.6b").status == 200
    assert not snapshot(cache, "Qwen/Qwen3-0.6B").exists()


def test_what_cannot_be_pulled_is_an_error(admin, hub: Hub, cache: Path):
    for model, message in (
        ("no/such", "the hub has no model 'no/such'"),
        ("new/kind", "Quire cannot run this model"),
        ("qwen3:7000b", "the short names of qwen3 are"),
        ("../x", "model should be a name"),
        ("--help", "model should be a name"),
    ):
        answer = pull(admin, model, stream=False)
        assert answer.status == 400
        assert message in answer.json["error"]
    *_, last = lines_of(pull(admin, "no/such"))
    assert "the hub has no model 'no/such'" in last["error"]
    assert not list(cache.glob("models--*"))


def test_a_damaged_file_is_deleted(admin, hub: Hub, cache: Path, monkeypatch):
    """The hub states a SHA-256 that the file does not have."""
    monkeypatch.setattr(Hub, "_content", staticmethod(lambda file: hashlib.sha256(file.name.encode()).hexdigest()))
    *_, last = lines_of(pull(admin, MODEL))
    assert "is damaged: its SHA-256 is" in last["error"]
    assert len(list((snapshot(cache).parents[1] / "blobs").iterdir())) == len(list(snapshot(cache).iterdir())) - 1


def test_a_download_ends_when_its_client_leaves(admin, hub: Hub, cache: Path):
    hub.stalls = (WEIGHTS,)
    with admin.connection("/api/pull", {"model": LARGE}) as connection:
        text, part = b"", re.compile(rb'"total":41943040,"completed":[1-9]')
        while not part.search(text):
            text += connection.recv(1 << 16)
        assert list(cache.glob("models--*/blobs/*.incomplete"))
    eventually(lambda: not admin.app.state.ollama.downloads._running)
    assert not list(cache.glob("models--*/blobs/*.incomplete"))
    hub.stalls = ()
    assert pull(admin, LARGE, stream=False).json == {"status": "success"}
    assert (snapshot(cache, LARGE) / WEIGHTS).stat().st_size == 40 << 20


def test_clients_share_a_download_and_only_a_few_run(admin, hub: Hub, cache: Path):
    hub.stalls = (WEIGHTS,)
    answers: list[Answer] = []
    with admin.connection("/api/pull", {"model": MODEL}), admin.connection("/api/pull", {"model": "tiny/other"}):
        eventually(lambda: len(list(cache.glob("models--*/blobs/*.incomplete"))) == 2)
        answer = pull(admin, "tiny/third", stream=False)
        assert (answer.status, answer.headers["retry-after"]) == (503, "60")
        thread = threading.Thread(target=lambda: answers.append(pull(admin, MODEL)))
        thread.start()
        [download] = [d for name, d in admin.app.state.ollama.downloads._running.items() if name == MODEL]
        eventually(lambda: download._followers == 2)
    # The first client has left, and the second one goes on.
    eventually(lambda: list(admin.app.state.ollama.downloads._running) == [MODEL])
    assert not [path for _, path in hub.requests if "third" in path]
    hub.stalls = ()
    hub.closing.set()  # what the hub has not sent is requested again
    thread.join()
    first, *_, last = lines_of(answers[0])
    assert first == {"status": "pulling manifest"}
    assert last == {"status": "success"}
