"""Adapters of a server: as models with names of their own, loaded and unloaded while it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.engine import ConfigError
from quire.engine.llm import LLM
from quire.lora import LoRARequest
from quire.messages.sampling_params import SamplingParams
from support.adapters import modules_of, write_adapter
from support.server import Host, Service, eventually

OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20, "enable_lora": True}
SLOTS = {"max_loras": 2, "max_lora_rank": 8}
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**OPTIONS, **SLOTS)


@pytest.fixture(scope="module")
def folder(offline, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    modules = {m: s for m, s in modules_of(offline, embedding=False).items() if "lm_head" not in m}
    for index, name in enumerate(("a", "b", "c")):
        write_adapter(folder / name, modules, rank=8, seed=index)
    write_adapter(folder / "bad", {"model.layers.0.nothing": (4, 4)})
    return folder


@pytest.fixture(scope="module")
def said(offline, folder) -> dict[str, str]:
    """What the model and each adapter say."""
    names = ["demo", "a", "b", "c"]
    loras = [None if name == "demo" else LoRARequest(name, 1, str(folder / name)) for name in names]
    params = SamplingParams(temperature=0, max_tokens=16)
    outputs = offline.generate([TEXT] * 4, params, use_tqdm=False, lora_request=loras)
    texts = {name: output.outputs[0].text for name, output in zip(names, outputs, strict=True)}
    assert len({*texts.values()}) == 4
    return texts


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(**OPTIONS, **SLOTS)
    yield host
    host.close()


@pytest.fixture
def service(host, folder) -> Service:
    service = host.serve(
        enable_admin_api=True,
        lora_folder=str(folder),
        lora_modules=[f"a={folder / 'a'}", f'{{"name": "bee", "path": "{folder / "b"}", "base_model_name": "base"}}'],
    )
    host.run(service.app.state.server.adapters.start())
    return service


def say(service: Service, model: str) -> str:
    return service.complete(TEXT, model=model, max_tokens=16)["choices"][0]["text"]


def test_adapters_are_models(service, said, folder):
    assert [say(service, name) for name in ("demo", "a", "bee")] == [said[name] for name in ("demo", "a", "b")]
    cards = {card["id"]: card for card in service.get("/v1/models").json["data"]}
    assert [*cards] == ["demo", "a", "bee"]
    assert [card["parent"] for card in cards.values()] == [None, "demo", "base"]
    assert cards["bee"]["root"] == str(folder / "b")
    assert service.get("/v1/models/bee").json == cards["bee"]
    error = service.post("/v1/completions", {"model": "nobody", "prompt": TEXT})
    assert error.status == 404
    assert error.error["message"] == "the model 'nobody' does not exist; this server has demo, a, bee"


def test_every_api_takes_their_names(service, said):
    chats = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": chats, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16, "store": False}),
        ("/v1/messages", {"messages": chats, "max_tokens": 4}),
        ("/api/chat", {"messages": chats, "stream": False, "options": {"num_predict": 4}}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}}),
        ("/tokenize", {"prompt": TEXT}),
    ):
        answer = service.post(path, {"model": "bee", **body})
        assert answer.status == 200, answer.body
        assert answer.json.get("model", "bee") == "bee"
    made = service.post(
        "/api/generate",
        {
            "model": "bee:latest",
            "prompt": TEXT,
            "raw": True,
            "stream": False,
            "options": {"num_predict": 16, "temperature": 0},
        },
    )
    assert made.json["response"] == said["b"]
    assert "bee:latest" in [model["name"] for model in service.get("/api/tags").json["models"]]


def load(service: Service, name: str, path: str, **fields: object) -> tuple[int, str]:
    answer = service.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})
    return answer.status, answer.body.decode() if answer.status == 200 else answer.error["message"]


def unload(service: Service, name: str) -> tuple[int, str]:
    answer = service.post("/v1/unload_lora_adapter", {"lora_name": name})
    return answer.status, answer.body.decode() if answer.status == 200 else answer.error["message"]


def test_loading_and_unloading(service, said, folder):
    assert load(service, "c", "c") == (200, "Success: LoRA adapter 'c' added successfully.")
    assert say(service, "c") == said["c"]
    status, message = load(service, "c", str(folder / "a"))
    assert (status, "'c' has already been loaded" in message) == (400, True)
    assert load(service, "c", str(folder / "a"), load_inplace=True)[0] == 200
    assert say(service, "c") == said["a"]
    assert unload(service, "c") == (200, "Success: LoRA adapter 'c' removed successfully.")
    assert unload(service, "c") == (404, "The lora adapter 'c' cannot be found.")
    assert service.post("/v1/completions", {"model": "c", "prompt": TEXT}).status == 404


def test_metrics_name_the_adapters_of_unfinished_requests(service):
    def shown() -> str:
        return next(
            line for line in service.get("/metrics").body.decode().splitlines() if "lora_requests_info{" in line
        )

    def labels(waiting: str, running: str) -> str:
        return f'{{max_lora="2",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}}'

    assert labels("", "") in shown()
    body = {"model": "a", "prompt": TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with service.connection("/v1/completions", body):
        eventually(lambda: labels("", "a") in shown())
    eventually(lambda: labels("", "") in shown())


def test_what_cannot_be_loaded(service, host, folder, tmp_path):
    assert load(service, "x", "../") == (403, "lora_path should be a folder below --lora-folder")
    assert load(service, "x", str(tmp_path))[0] == 403
    (folder / "link").symlink_to(tmp_path)
    assert load(service, "x", "link")[0] == 403
    assert load(service, "x", "nothing") == (404, "there is no folder 'nothing'")
    assert load(service, "demo", "a") == (400, "'demo' is the name of the model")
    assert load(service, "x", "a\0") == (400, "lora_path: embedded null byte")
    status, message = load(service, "x", "bad")
    assert (status, "no linear layer for model.layers.0.nothing" in message) == (400, True)
    assert "x" not in [card["id"] for card in service.get("/v1/models").json["data"]]
    for options in ({}, {"enable_admin_api": True}):
        status, message = load(host.serve(**options), "x", "a")
        assert (status, "--enable-admin-api --lora-folder" in message) == (403, True)
    with pytest.raises(ConfigError, match="lora_folder needs enable_admin_api"):
        host.serve(lora_folder=str(folder))
    for modules, reason in (
        (["bad"], "should be name=path"),
        (["bad=/nowhere"], "bad: "),
        (['{"name": "x"}'], "name and path"),
        (['{"name": "x", "path": 3}'], "name and path, two strings"),
        ([f"demo={folder / 'a'}"], "the name 'demo' is taken"),
        ([f"x={folder / 'a'}", f"x={folder / 'b'}"], "the name 'x' is taken"),
    ):
        with pytest.raises(ConfigError, match=reason):
            host.run(host.serve(lora_modules=modules).app.state.server.adapters.start())


def test_adapters_come_and_go_under_load(service, host, said):
    """Streams of two adapters and the model, while a third is loaded, used and unloaded, with slots for two."""
    wrong: list[str] = []
    over = threading.Event()

    def ask(name: str, key: str) -> None:
        while not over.is_set():
            if (text := say(service, name)) != said[key]:
                wrong.append(f"{name}: {text}")

    askers = [threading.Thread(target=ask, args=pair) for pair in (("demo", "demo"), ("a", "a"), ("a", "a"))]
    for asker in askers:
        asker.start()
    try:
        for number in range(3):
            assert load(service, "c", "c")[0] == 200
            assert say(service, "c") == said["c"]
            assert say(service, "bee") == said["b"]
            running = threading.Thread(target=ask_once, args=(service, said["c"], wrong))
            running.start()
            for _ in range(number % 3):  # so it comes before the adapter is unloaded, or not
                assert say(service, "demo") == said["demo"]
            assert unload(service, "c")[0] == 200
            running.join()
    finally:
        over.set()
        for asker in askers:
            asker.join()
    assert not wrong
    eventually(lambda: host.is_idle)


def ask_once(service: Service, expected: str, wrong: list[str]) -> None:
    answer = service.post("/v1/completions", {"model": "c", "prompt": TEXT, "max_tokens": 16, "temperature": 0})
    if answer.status != 404 and answer.json["choices"][0]["text"] != expected:
        wrong.append(f"unloaded: {answer.body!r}")


def test_an_adapter_whose_files_are_gone_fails_its_own_requests(service, host, folder, said, offline):
    """It was loaded, then others took its place in memory."""
    modules = {m: s for m, s in modules_of(offline, embedding=False).items() if "lm_head" not in m}
    gone = write_adapter(folder / "gone", modules, rank=8, seed=9)
    assert load(service, "gone", "gone")[0] == 200
    for file in gone.iterdir():
        file.unlink()
    assert say(service, "a") + say(service, "bee") == said["a"] + said["b"]
    answer = service.post("/v1/completions", {"model": "gone", "prompt": TEXT, "max_tokens": 4})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "adapter 'gone' cannot be used" in answer.error["message"]
    assert say(service, "a") == said["a"]
    eventually(lambda: host.is_idle)
