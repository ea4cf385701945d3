"""Loading and unloading as clients of Ollama and of llama.cpp's router ask for it, and models of different kinds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest

import quire.demo
from support.many_models import ONE, ManyModels, declare
from support.minilm import minilm
from support.server import eventually

DEMO = Path(quire.demo.__file__).parent
SHORT = {"stream": False, "options": {"temperature": 0, "num_predict": 4}}


@pytest.fixture(scope="module")
def models() -> Iterator[ManyModels]:
    declared = [declare("a"), declare("b", ttl=3600.0), declare("vision", DEMO / "vision", pinned=True)]
    with ManyModels(declared, enable_admin_api=True) as server:
        eventually(lambda: server.states["vision"] == "loaded")
        yield server


def expiry(server: ManyModels, name: str) -> float | None:
    """In how many seconds a loaded model is unloaded, as /api/ps tells; None for never."""
    [found] = [entry for entry in server.get("/api/ps").json["models"] if entry["name"] == f"{name}:latest"]
    moment = datetime.fromisoformat(found["expires_at"])
    return None if moment.year == 9999 else (moment - datetime.now(UTC)).total_seconds()


@pytest.mark.slow
def test_ollamas_requests_decide_how_long_a_model_stays(models: ManyModels):
    load = models.post("/api/generate", {"model": "a:latest", "stream": False}).json
    assert (load["done"], load["done_reason"], load["model"]) == (True, "load", "a:latest")
    assert 290 < (expiry(models, "a") or 0) <= 300  # Ollama's default
    models.post("/api/generate", {"model": "a", "prompt": "Hi", "keep_alive": "10m", **SHORT})
    assert 590 < (expiry(models, "a") or 0) <= 600
    models.say("a")
    assert 590 < (expiry(models, "a") or 0) <= 600
    models.post("/api/generate", {"model": "a", "prompt": "Hi", "keep_alive": -1, **SHORT})
    assert expiry(models, "a") is None
    models.post("/api/chat", {"model": "b", "messages": [], "stream": False})
    assert 3500 < (expiry(models, "b") or 0) <= 3600
    models.post("/api/generate", {"model": "a", "prompt": "Hi", "keep_alive": 0.1, **SHORT})
    eventually(lambda: models.states["a"] == "unloaded")


@pytest.mark.slow
def test_ollamas_requests_unload_a_model_without_loading_it(models: ManyModels):
    models.say("a")
    loads = models.loads("a")
    for _ in range(2):
        unload = models.post("/api/generate", {"model": "a", "keep_alive": 0}).json
        assert (unload["done"], unload["done_reason"]) == (True, "unload")
        eventually(lambda: models.states["a"] == "unloaded")
    assert models.loads("a") == loads
    created = models.post("/api/create", {"model": "brief", "from": "a", "system": "Be brief.", "stream": False})
    assert created.json == {"status": "success"}
    names = [entry["name"] for entry in models.get("/api/tags").json["models"]]
    assert "brief:latest" in names
    models.post("/models/unload", {"model": "a"})
    eventually(lambda: models.states["a"] == "unloaded")
    shown = models.post("/api/show", {"model": "brief"}).json
    assert (shown["system"], shown["details"]["parent_model"]) == ("Be brief.", "a")
    assert "completion" in models.post("/api/show", {"model": "a:latest"}).json["capabilities"]
    assert models.post("/api/show", {"model": "none"}).status == 404
    assert models.states["a"] == "unloaded"
    answer = models.post("/api/chat", {"model": "brief", "messages": [{"role": "user", "content": "Hi"}], **SHORT})
    assert answer.json["model"] == "brief"
    assert models.request("DELETE", "/api/delete", b'{"model": "brief"}').status == 200
    assert models.request("DELETE", "/api/delete", b'{"model": "a"}').status == 409


@pytest.mark.slow
def test_llamacpps_router_endpoints(models: ManyModels):
    models.post("/models/unload", {"model": "b"})
    eventually(lambda: models.states["b"] == "unloaded")
    refused = models.post("/v1/completions?autoload=false", {"model": "b", "prompt": "a"})
    assert (refused.status, refused.error["message"]) == (400, "model is not loaded")
    assert models.post("/models/load", {"model": "b"}).json == {"success": True}
    eventually(lambda: models.states["b"] == "loaded")
    assert models.post("/models/load", {"model": "b"}).error["message"] == "model is already loaded"
    [entry] = [entry for entry in models.get("/models").json["data"] if entry["id"] == "b"]
    assert entry["status"]["args"][:2] == ["quire", "serve"]
    assert entry["object"] == "model"
    assert models.post("/models/unload", {"model": "b"}).json == {"success": True}
    eventually(lambda: models.states["b"] == "unloaded")
    assert models.post("/models/unload", {"model": "b"}).error["message"] == "model is not loaded"
    assert models.post("/models/unload", {"model": "vision"}).status == 409
    assert models.post("/models/load", {"model": "none"}).status == 404
    assert models.post("/models/load", {}).error["param"] == "model"


@pytest.mark.slow
def test_operators_control_the_engine_of_a_model(models: ManyModels):
    assert models.request("POST", "/sleep?model=vision").status == 200
    assert models.states["vision"] == "sleeping"
    assert models.get("/is_sleeping?model=vision").json == {"is_sleeping": True}
    assert models.request("POST", "/wake_up?model=vision").status == 200
    assert models.states["vision"] == "loaded"
    models.post("/models/unload", {"model": "b"})
    eventually(lambda: models.states["b"] == "unloaded")
    assert models.request("POST", "/pause?model=b").error["code"] == "model_not_loaded"
    assert models.request("POST", "/reset_prefix_cache").status == 200
    assert models.post("/abort_requests", {"request_ids": ["x"]}).json == {"aborted": 0}
    assert models.get("/load").json == {"server_load": 0}


@pytest.mark.slow
def test_models_of_all_kinds_answer_openais_client():
    declared = [declare("chat"), declare("search", minilm(), options={"kv_cache_memory_bytes": None})]
    with (
        ManyModels(declared, memory=2 * ONE) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        vectors = client.embeddings.create(model="search", input=["one", "two"]).data
        assert len(vectors) == 2
        messages = [{"role": "user", "content": "Hello"}]
        answer = client.chat.completions.create(model="chat", messages=messages, max_tokens=4)
        assert answer.model == "chat"
        with client.chat.completions.create(model="chat", messages=messages, max_tokens=4, stream=True) as chunks:
            assert [chunk for chunk in chunks if chunk.choices]
        assert client.models.retrieve("search").id == "search"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="chat", input="one")
        form = (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
            b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
        )
        kind = "multipart/form-data; boundary=x"
        assert server.request("POST", "/v1/audio/transcriptions", form, Content_Type=kind).status == 404
        spoken = server.request(
            "POST", "/v1/audio/transcriptions", form.replace(b"whisper", b"chat"), Content_Type=kind
        )
        assert spoken.status in (400, 501)
