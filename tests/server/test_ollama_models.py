"""Ollama's API for models: /api/create, copy, delete, push and blobs, and what lists say about their results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quire.checkpoints.hub import bundled_model
from quire.cli.main import main
from quire.server.ollama import blobs
from support.gguf_files import write_gguf
from support.server import Answer, Host, Service

SYSTEM = "Answer with one word."
USER = {"role": "user", "content": "Tell me a story about a dog."}
OPTIONS = {"temperature": 0, "num_predict": 12}
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """An engine whose cache of models is a new folder."""
    folder = str(tmp_path_factory.mktemp("cache"))
    host = Host(dtype="float32", max_num_seqs=16, kv_cache_memory_bytes=64 << 20, download_dir=folder)
    yield host
    host.close()


@pytest.fixture(scope="module")
def cache(host: Host) -> Path:
    return Path(host.llm.config.model.download_dir)


@pytest.fixture(scope="module")
def admin(host: Host) -> Service:
    return host.serve(enable_admin_api=True)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(bundled_model(), tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0").read_bytes()


def done(answer: Answer, status: int = 200) -> Answer:
    assert answer.status == status, answer.body
    return answer


def create(service: Service, model: str, **fields) -> None:
    body = {"model": model, "from": "demo", **fields}
    if "files" in fields:
        del body["from"]
    assert done(service.post("/api/create", {**body, "stream": False})).json == {"status": "success"}


def delete(service: Service, model: str) -> Answer:
    return service.request("DELETE", "/api/delete", json.dumps({"model": model}).encode())


def names(service: Service) -> set[str]:
    return {model["name"] for model in service.get("/api/tags").json["models"]}


def chat(service: Service, model: str, messages=(USER,), **fields) -> str:
    body = {"model": model, "messages": list(messages), "stream": False, "options": OPTIONS, **fields}
    return done(service.post("/api/chat", body)).json["message"]["content"]


def test_a_created_model_has_defaults_which_requests_override(admin, host: Host):
    create(admin, "brief", system=SYSTEM, parameters={"num_predict": 5, "temperature": 0, "stop": [" zebra"]})
    system = {"role": "system", "content": SYSTEM}
    whole = chat(admin, "demo", [system, USER])
    short = chat(admin, "brief:latest", options={})
    assert len(short) < len(whole)
    assert whole.startswith(short)
    assert chat(admin, "brief") == whole
    other = {"role": "system", "content": "Be long."}
    assert chat(admin, "brief", [other, USER]) == chat(admin, "demo", [other, USER])
    body = {"model": "brief", "prompt": USER["content"], "stream": False}
    answer = done(admin.post("/api/generate", body)).json
    assert (answer["model"], answer["response"], answer["eval_count"]) == ("brief", short, 5)
    assert {"demo:latest", "brief:latest"} <= names(admin)
    shown = done(admin.post("/api/show", {"model": "brief"})).json
    assert (shown["system"], shown["details"]["parent_model"]) == (SYSTEM, "demo")
    assert f'SYSTEM """{SYSTEM}"""' in shown["modelfile"]
    assert "num_predict                    5" in shown["parameters"].splitlines()
    assert 'stop                           " zebra"' in shown["parameters"].splitlines()
    models = {model["name"]: model for model in admin.get("/api/tags").json["models"]}
    assert models["brief:latest"]["digest"] != models["demo:latest"]["digest"]
    changed = datetime.fromisoformat(models["brief:latest"]["modified_at"])
    assert abs((datetime.now(UTC) - changed).total_seconds()) < 3600
    # Other servers with this model have it, too, and another process may delete it.
    plain = host.serve()
    assert "brief:latest" in names(plain)
    done(delete(admin, "brief"))
    assert "brief:latest" not in names(plain)
    done(plain.post("/api/show", {"model": "brief"}), 404)


def test_a_created_model_can_have_a_template_and_the_beginning_of_conversations(admin):
    begun = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "upon"}]
    create(admin, "team/plain:1", template=PLAIN, messages=begun)
    expected = admin.complete("Once upon a ", max_tokens=12)["choices"][0]["text"]
    assert chat(admin, "team/plain:1", [{"role": "user", "content": "a"}]) == expected
    shown = done(admin.post("/api/show", {"model": "team/plain:1"})).json
    assert (shown["template"], shown["messages"]) == (PLAIN, begun)
    assert "MESSAGE assistant upon" in shown["modelfile"]
    create(admin, "child", **{"from": "team/plain:1"}, system=SYSTEM)
    assert done(admin.post("/api/show", {"model": "child"})).json["template"] == PLAIN
    done(admin.post("/api/copy", {"source": "child", "destination": "copied"}))
    assert done(admin.post("/api/show", {"model": "copied"})).json["system"] == SYSTEM
    for name in ("team/plain:1", "child", "copied"):
        done(delete(admin, name))


def test_progress_comes_as_lines(admin):
    answer = done(admin.post("/api/create", {"model": "lines", "from": "demo"}))
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1] == {"status": "success"}
    done(delete(admin, "lines"))


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"from": "unknown"}, 404, "from: 'unknown' is neither the served model nor one that was created"),
        ({"from": None}, 400, "one of from and files is needed"),
        ({"model": "../evil"}, 400, "model should be a name"),
        ({"model": "/etc/passwd"}, 400, "model should be a name"),
        ({"model": "demo"}, 409, "the name 'demo' is taken"),
        ({"template": "{{ .System }} {{ .Prompt }}"}, 400, "template is a Go template"),
        ({"template": "{{- if .System }}x{{ end }}"}, 400, "template is a Go template"),
        ({"template": "{% if %}"}, 400, "template"),
        ({"parameters": {"temperature": "hot"}}, 400, "parameters.temperature"),
        ({"parameters": {"stop": 5}}, 400, "parameters.stop"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ({"quantize": "q4_K_M"}, 400, "quantize is not supported"),
        ({"adapters": {"a": "sha256:0"}}, 400, "adapters is not supported"),
        ({"modelfile": "FROM x"}, 400, "modelfile is not a field any more"),
        ({"from": None, "files": {"a.safetensors": "sha256:" + "0" * 64}}, 400, "files should be one GGUF file"),
        ({"from": None, "files": {"a.gguf": "sha256:1"}}, 400, "files should be sha256: and 64"),
        ({"from": None, "files": {"a.gguf": "sha256:" + "0" * 64}}, 400, "has not been uploaded"),
    ],
)
def test_what_cannot_be_created_is_refused(admin, fields, status, message):
    before = names(admin)
    answer = done(admin.post("/api/create", {"model": "new", "from": "demo", **fields}), status)
    assert message in answer.json["error"]
    assert names(admin) == before


def test_only_admins_change_models(host: Host, admin):
    plain = host.serve()
    digest = "sha256:" + "0" * 64
    requests = [
        ("POST", "/api/pull", {"model": "qwen3"}),
        ("POST", "/api/push", {"model": "demo"}),
        ("POST", "/api/create", {"model": "a", "from": "demo"}),
        ("DELETE", "/api/delete", {"model": "demo"}),
        ("POST", "/api/copy", {"source": "demo", "destination": "b"}),
        ("POST", f"/api/blobs/{digest}", {}),
    ]
    for method, path, body in requests:
        answer = done(plain.request(method, path, json.dumps(body).encode()), 403)
        assert "--enable-admin-api" in answer.json["error"]
    assert plain.request("HEAD", f"/api/blobs/{digest}").status == 403
    assert "uploads no models" in done(admin.post("/api/push", {"model": "demo"}), 400).json["error"]


def test_what_is_served_or_unknown_is_not_deleted(admin):
    assert "is being served" in done(delete(admin, "demo"), 409).json["error"]
    assert "not in the hub's cache" in done(delete(admin, "no/such"), 404).json["error"]
    done(admin.post("/api/copy", {"source": "no", "destination": "b"}), 404)
    done(admin.post("/api/copy", {"source": "demo", "destination": "-b"}), 400)


def test_a_model_is_created_from_an_uploaded_file(admin, cache: Path, gguf: bytes, capsys):
    digest = f"sha256:{hashlib.sha256(gguf).hexdigest()}"
    path = f"/api/blobs/{digest}"
    assert admin.request("HEAD", path).status == 404
    done(admin.request("POST", path, gguf), 201)
    done(admin.request("POST", path, gguf), 200)
    assert admin.request("HEAD", path).status == 200
    create(admin, "uploaded", files={"model.gguf": digest}, system=SYSTEM)
    assert "uploaded:latest" not in names(admin)  # another server can serve it
    assert main(["list", "--json", "--download-dir", str(cache)]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["uploaded"]["format"] == "from model.gguf"
    assert lines["uploaded"]["size"] == len(gguf)
    done(admin.post("/api/copy", {"source": "uploaded", "destination": "second"}))
    done(delete(admin, "uploaded"))
    assert admin.request("HEAD", path).status == 200
    assert main(["rm", "-y", "second", "--download-dir", str(cache)]) == 0
    assert admin.request("HEAD", path).status == 404


def test_a_created_model_is_served_by_its_name(admin, cache: Path, gguf: bytes, capsys):
    from quire.cli.flags import engine_options, server_options
    from quire.cli.main import build_parser

    digest = hashlib.sha256(gguf).hexdigest()
    done(admin.request("POST", f"/api/blobs/sha256:{digest}", gguf), 201)
    create(admin, "from-file", files={"model.gguf": f"sha256:{digest}"}, system=SYSTEM)
    create(admin, "from-demo")

    def options(name: str):
        arguments = build_parser("serve").parse_args(["serve", name, "--download-dir", str(cache)])
        engine_options(arguments)
        return arguments.model, server_options(arguments)["served_model_name"]

    assert options("from-demo:latest") == (None, ["quire-demo", "from-demo"])
    file, served = options("from-file")
    assert served == ["from-file"]
    other = Host(model=file, dtype="float32", kv_cache_memory_bytes=64 << 20, download_dir=str(cache))
    try:
        service = other.serve(served_model_name=served, enable_admin_api=True)
        [model] = service.get("/api/tags").json["models"]
        assert (model["name"], model["size"]) == ("from-file:latest", len(gguf))
        assert (model["details"]["format"], model["details"]["quantization_level"]) == ("gguf", "Q8_0")
        shown = service.post("/api/show", {"model": "from-file", "verbose": True}).json
        assert (shown["system"], shown["model_info"]["general.parameter_count"]) == (SYSTEM, 4492672)
        assert len(shown["model_info"]["tokenizer.ggml.tokens"]) == 4096
        assert "is being served" in done(delete(service, "from-file"), 409).json["error"]
        system = {"role": "system", "content": SYSTEM}
        assert chat(service, "from-file") == chat(service, "from-file", [system, USER])
    finally:
        other.close()
    for name in ("from-file", "from-demo"):
        done(delete(admin, name))


def test_an_upload_is_checked_and_bounded(admin, cache: Path, gguf: bytes, monkeypatch):
    folder = cache / ".quire" / "blobs"
    wrong = "sha256:" + "0" * 64
    answer = done(admin.request("POST", f"/api/blobs/{wrong}", gguf), 400)
    assert hashlib.sha256(gguf).hexdigest() in answer.json["error"]
    assert not list(folder.glob("*.part"))
    for digest in ("sha256:12", "md5:" + "0" * 64, "sha256:..%2f..%2fx"):
        done(admin.request("POST", f"/api/blobs/{digest}", b""), 400 if "%" not in digest else 404)
    small = "sha256:" + hashlib.sha256(bytes(100_000)).hexdigest()
    done(admin.request("POST", f"/api/blobs/{small}", bytes(100_000)), 201)
    # What became no model is deleted a day later.
    path = folder / f"sha256-{small[7:]}.gguf"
    os.utime(path, (10**9, 10**9))
    done(admin.request("POST", f"/api/blobs/{wrong}", b""), 400)
    assert not path.exists()
    monkeypatch.setattr(blobs, "_SPARE", 1 << 60)
    assert "no room" in done(admin.request("POST", f"/api/blobs/{small}", bytes(100_000)), 507).json["error"]


def test_a_large_file_can_be_uploaded_where_bodies_are_small(host: Host, cache: Path):
    service = host.serve(enable_admin_api=True, max_body_bytes=10_000, max_total_body_bytes=10_000)
    digest = hashlib.sha256(bytes(9_000_000)).hexdigest()
    done(service.request("POST", f"/api/blobs/sha256:{digest}", bytes(9_000_000)), 201)
    file = cache / ".quire" / "blobs" / f"sha256-{digest}.gguf"
    assert file.stat().st_size == 9_000_000
    message = done(service.post("/api/create", {"model": "zeros", "files": {"x.gguf": f"sha256:{digest}"}}), 400)
    assert "files: Quire cannot run 'x.gguf'" in message.json["error"]
    file.unlink()
    done(service.post("/api/chat", {"messages": [{"role": "user", "content": "a" * 20_000}]}), 413)


def test_a_file_that_is_no_created_model_hides_no_other(admin, cache: Path, caplog):
    create(admin, "good")
    (cache / ".quire" / "created" / "bad.json").write_text("{")
    assert "good:latest" in names(admin)
    assert "bad.json, which describes no created model" in caplog.text
    (cache / ".quire" / "created" / "bad.json").unlink()
    done(delete(admin, "good"))
