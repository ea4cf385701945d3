"""Several models behind one port: loaded when a request needs them, unloaded when others need their memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import quire.demo
from quire.config.engine import ConfigError
from quire.server.multimodel.declarations import ModelDeclaration
from support.many_models import ONE, ManyModels, copy_model, declare
from support.server import eventually

DEMO = Path(quire.demo.__file__).parent
MODEL = DEMO / "model"


@pytest.fixture(scope="module")
def models() -> Iterator[ManyModels]:
    """A server with room for two of its models."""
    declared = [declare("first", aliases=["gpt-x"]), declare("second"), declare("vision", DEMO / "vision")]
    huge = declare("huge", options={"kv_cache_memory_bytes": 8 << 30})
    with ManyModels([*declared, huge], memory=2 * ONE, sse_keep_alive_interval=0.05) as server:
        yield server


def test_requests_for_a_model_share_one_load_and_say_the_same(models: ManyModels):
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(models.say, ["first", "gpt-x", None] * 2))
    assert len(set(texts)) == 1
    assert models.loads("first") == 1
    assert models.states == {"first": "loaded", "second": "unloaded", "vision": "unloaded", "huge": "unloaded"}


def test_the_least_recently_used_model_makes_room(models: ManyModels):
    first = models.say("first")
    assert models.say("second") == first  # the same checkpoint
    models.say("first")
    assert models.say("vision")
    assert models.states == {"first": "loaded", "second": "unloaded", "vision": "loaded", "huge": "unloaded"}
    assert [entry["memory"] > 0 for entry in models.get("/models").json["data"]] == [True, False, True, False]
    assert models.metric("model_memory_bytes") > 0
    lines = models.get("/metrics").body.decode().splitlines()
    assert len([line for line in lines if line.startswith("# TYPE quire:num_requests_running ")]) == 1
    assert {line.split('model_name="')[1].split('"')[0] for line in lines if "num_requests_running{" in line} == {
        "first",
        "vision",
    }


def test_a_model_that_never_fits_is_refused_with_the_numbers(models: ManyModels):
    before = models.states
    answer = models.post("/v1/completions", {"model": "huge", "prompt": "a"})
    assert (answer.status, answer.error["code"]) == (507, "insufficient_memory")
    assert "needs 8.24 GiB (weights 0.01 GiB, process 0.23 GiB, KV cache 8.00 GiB)" in answer.error["message"]
    assert "may use 0.59 GiB in total" in answer.error["message"]
    assert models.states == before


def test_unknown_names_and_paths_load_nothing(models: ManyModels):
    before = {name: models.loads(name) for name in ("first", "second", "vision")}
    answer = models.post("/v1/chat/completions", {"model": "gpt-9", "messages": []})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert "first, gpt-x, second" in answer.error["message"]
    assert models.get("/v1/nothing").status == 404
    assert models.get("/v1/completions").status == 405
    assert models.request("POST", "/v1/completions", b"{").error["code"] == "invalid_json"
    assert models.post("/v1/completions", {"model": 3, "prompt": "a"}).error["param"] == "model"
    assert models.request("POST", "/pause?model=first").status == 403
    assert models.post("/api/chat", {"model": "gpt-9"}).json["error"].startswith("the model 'gpt-9' does not exist")
    assert {name: models.loads(name) for name in before} == before


def test_all_names_are_listed_in_every_apis_form(models: ManyModels):
    names = ["first", "gpt-x", "second", "vision", "huge"]
    cards = models.get("/v1/models").json["data"]
    assert [card["id"] for card in cards] == names
    assert {card["status"]["value"] for card in cards} == {"loaded", "unloaded"}
    assert models.get("/v1/models/vision").json["id"] == "vision"
    assert models.get("/v1/models/none").status == 404
    page = models.get("/v1/models?limit=3", anthropic_version="2023-06-01").json
    assert [card["id"] for card in page["data"]] == names[:3]
    tags = models.get("/api/tags").json["models"]
    assert [tag["name"] for tag in tags] == [f"{name}:latest" for name in names]
    assert all(tag["size"] > 1e6 and len(tag["digest"]) == 64 for tag in tags)
    loaded = models.get("/api/ps").json["models"]
    assert all(0 < entry["size"] < ONE and entry["expires_at"].startswith("9999") for entry in loaded)
    assert "/v1/chat/completions" in models.get("/openapi.json").json["paths"]
    assert models.get("/health").json == {"reference_kernels": False}


def test_a_stream_that_waits_for_its_model_is_kept_alive(models: ManyModels):
    expected = models.say("first")
    models.say("vision")
    assert models.states["second"] == "unloaded"
    body = {"model": "second", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "stream": True}
    answer = models.post("/v1/completions", body)
    assert answer.body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    events = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == expected
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_declarations_are_checked_at_start():
    with pytest.raises(ConfigError, match="'a': port is an option of the whole server"):
        ModelDeclaration.create("a", None, {"port": 1})
    with pytest.raises(ConfigError, match=r"'a': .*max_model_len"):
        ModelDeclaration.create("a", None, {"max-model-len": 0})
    with pytest.raises(ConfigError, match="two models have the name 'b'"):
        ManyModels([declare("a", aliases=["b"]), declare("b")])


# ---- slower


@pytest.mark.slow
def test_a_broken_checkpoint_is_reported_and_loaded_once_it_is_whole(tmp_path: Path):
    broken = copy_model(MODEL, tmp_path / "broken")
    [weights] = broken.glob("*.safetensors")
    weights.rename(tmp_path / "aside")
    weights.write_bytes(b"not weights")
    with ManyModels([declare("broken", broken), declare("whole")]) as server:
        answer = server.post("/v1/completions", {"model": "broken", "prompt": "a"})
        assert (answer.status, answer.error["code"]) == (500, "model_load_failed")
        assert str(weights) in answer.error["message"]
        [state, _] = server.get("/models").json["data"]
        assert (state["status"]["value"], state["status"]["failed"]) == ("unloaded", True)
        stream = server.post("/v1/completions", {"model": "broken", "prompt": "a", "stream": True})
        assert stream.error["code"] == "model_load_failed"
        weights.unlink()
        (tmp_path / "aside").rename(weights)
        assert server.say("broken") == server.say("whole")


@pytest.mark.slow
def test_running_requests_end_before_their_model_is_unloaded():
    with ManyModels([declare("a"), declare("b")], memory=ONE) as server, ThreadPoolExecutor(8) as pool:
        endless = {"max_tokens": 400, "ignore_eos": True}
        alone = server.complete("1 1 1", model="a", **endless)["choices"][0]["text"]
        long = [pool.submit(server.complete, "1 1 1", model="a", **endless) for _ in range(2)]
        eventually(lambda: server.model("a").num_running == 2)
        other = pool.submit(server.say, "b")
        eventually(lambda: server.model("a").is_closing or other.done())
        later = pool.submit(server.say, "a")  # it comes after the request for the other model
        texts = [future.result()["choices"][0]["text"] for future in long]
        assert texts == [alone] * 2
        assert other.result() == later.result()
        assert (server.loads("a"), server.loads("b")) == (2, 1)


@pytest.mark.slow
def test_a_request_waits_for_memory_only_for_so_long():
    with ManyModels([declare("a"), declare("b")], memory=ONE, model_wait=0.3) as server, ThreadPoolExecutor(2) as pool:
        assert server.post("/models/load", {"model": "a"}).json == {"success": True}
        eventually(lambda: server.states["a"] == "loaded")
        running = pool.submit(server.complete, "1 1 1", model="a", max_tokens=600, ignore_eos=True, n=8, temperature=1)
        eventually(lambda: server.model("a").num_running == 1)
        answer = server.post("/v1/completions", {"model": "b", "prompt": "a"})
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "model_not_loaded", "5")
        assert "'b' was not loaded within 0.3 s: it needs 0." in answer.error["message"]
        assert "requests are running on a (0." in answer.error["message"]
        assert server.states == {"a": "loaded", "b": "unloaded"}
        assert len(running.result()["choices"]) == 8
    with ManyModels([declare("a")], max_waiting_for_models=0) as server:
        assert server.post("/v1/completions", {"prompt": "a"}).error["code"] == "server_overloaded"


@pytest.mark.slow
def test_a_crash_of_one_model_leaves_the_others():
    with ManyModels([declare("a"), declare("b")]) as server:
        expected = server.say("a")
        server.say("b")
        loaded = server.model("b").loaded
        assert loaded is not None
        [core] = loaded.llm.client.process_ids
        os.kill(core, signal.SIGKILL)
        assert server.say("a") == expected
        assert server.say("b") == expected  # its core is replaced
        server.run(loaded.llm.shutdown())  # as after too many losses
        assert server.say("a") == expected
        assert server.say("b") == expected
        assert (server.loads("a"), server.loads("b")) == (1, 2)


@pytest.mark.slow
def test_idle_models_are_unloaded_after_their_time_to_live():
    with ManyModels([declare("short", ttl=0.2), declare("pinned", ttl=0.2, pinned=True)]) as server:
        eventually(lambda: server.states["pinned"] == "loaded")
        server.say("short")
        server.say("pinned")
        eventually(lambda: server.states["short"] == "unloaded")
        assert server.states["pinned"] == "loaded"
        server.say("short")
        assert server.loads("short") == 2


@pytest.mark.slow
def test_models_of_a_folder_appear_and_disappear(tmp_path: Path):
    copy_model(MODEL, tmp_path / "one")
    with ManyModels([], models_dir=str(tmp_path)) as server:
        assert list(server.states) == ["one"]
        text = server.say("one")
        copy_model(MODEL, tmp_path / "two")
        assert server.say("two") == text
        assert list(server.states) == ["one", "two"]
        copy_model(MODEL, tmp_path / "three")
        assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["one", "two", "three"]
        shutil.rmtree(tmp_path / "three")
        assert list(server.states) == ["one", "two"]


@pytest.mark.slow
def test_responses_and_background_runs_belong_to_no_model():
    with ManyModels([declare("a"), declare("b")], memory=ONE) as server:
        made = server.post("/v1/responses", {"model": "a", "input": "Hello", "max_output_tokens": 8}).json
        later = {"model": "b", "input": "And?", "previous_response_id": made["id"], "max_output_tokens": 8}
        second = server.post("/v1/responses", later).json
        assert server.states == {"a": "unloaded", "b": "loaded"}
        assert server.get(f"/v1/responses/{made['id']}").json["output"] == made["output"]
        items = server.get(f"/v1/responses/{second['id']}/input_items").json["data"]
        assert len(items) == 3
        background = {"model": "b", "input": "1 1 1", "background": True, "max_output_tokens": 200}
        running = server.post("/v1/responses", background).json
        server.say("a")  # waits until the response is complete
        assert server.get(f"/v1/responses/{running['id']}").json["status"] in ("completed", "incomplete")


@pytest.mark.slow
def test_limits_and_adapters_of_a_model_are_its_own(tmp_path: Path):
    adapter = DEMO / "adapters" / "rhyme"
    options = {"enable_lora": True, "lora_modules": [f"rhyme={adapter}"], "max_generated_tokens": 4}
    with ManyModels([declare("plain"), declare("adapted", options=options)]) as server:
        assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["plain", "adapted", "rhyme"]
        body = {"prompt": "Once", "max_tokens": 5}
        assert server.post("/v1/completions", {**body, "model": "rhyme"}).error["param"] == "max_tokens"
        assert server.post("/v1/completions", {**body, "model": "plain"}).status == 200
        answer = server.post("/v1/completions", {**body, "model": "rhyme", "max_tokens": 4})
        assert answer.json["model"] == "rhyme"
        assert server.states == {"plain": "loaded", "adapted": "loaded"}
