"""Pauses, sleep and new weights, over HTTP and in AsyncLLM."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.hub import bundled_model
from quire.config.engine import ConfigError
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from support.server import Host, Service, eventually
from support.trainer import Trainer, described
from support.waiting import LONGEST

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16}
OPTIONS["kv_cache_memory_bytes"] = 64 << 20
TEXT = "Once upon a time there was a small engine that could read a whole book in one night, and it said to the dog"
LONG = {"prompt": TEXT, "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folders of weights: good ones, and some that do not fit."""
    folder = tmp_path_factory.mktemp("weights")
    source = bundled_model()
    for name in ("new", "missing"):
        shutil.copytree(source, folder / name)
        tensors = load_file(source / "model.safetensors")
        draw = torch.Generator().manual_seed(1)
        for value in tensors.values():
            if value.dim() > 1:
                value += (0.02 * torch.randn(value.shape, generator=draw)).to(value.dtype)
        if name == "missing":
            del tensors[next(key for key in tensors if key.endswith("down_proj.weight"))]
        save_file(tensors, folder / name / "model.safetensors")
    (folder.parent / "outside").mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host(**OPTIONS)
    yield host
    host.close()


@pytest.fixture
def service(host: Host, folder: Path) -> Iterator[Service]:
    service = host.serve(enable_admin_api=True, weights_folder=str(folder))
    yield service
    service.request("POST", "/wake_up")  # a test that fails leaves the others an engine that runs
    service.request("POST", "/resume")


class Expected(dict[str, str]):
    """What the model says with its old weights and with new ones, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._models = {"old": None, "new": str(folder / "new")}

    def __missing__(self, name: str) -> str:
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        [output] = LLM(self._models[name], **OPTIONS).generate(TEXT, params, use_tqdm=False)
        self[name] = output.outputs[0].text
        return self[name]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


class Running:
    """A request that runs on a thread."""

    def __init__(self, service: Service, **fields: Any) -> None:
        self.result: Any = None
        self._service, self._fields = service, {**LONG, **fields}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._service.complete(**self._fields)["choices"][0]

    def end(self) -> Any:
        self._thread.join(LONGEST)
        assert self.result is not None
        return self.result


def runs(host: Host) -> None:
    eventually(lambda: host.llm.client.stats.num_running == 1)


def says_the_beginning(choice: Any, text: str) -> None:
    """A choice that was cut off has the beginning of this text."""
    assert len(choice["text"]) > 60
    assert text.startswith(choice["text"])


def order(service: Service, path: str) -> Any:
    answer = service.request("POST", path)
    assert answer.status == 200, answer.body
    return answer.json if answer.body else None


@pytest.mark.slow
def test_a_request_that_is_kept_goes_on_behind_the_pause_and_says_the_same(host, service, expected):
    request = Running(service)
    runs(host)
    assert order(service, "/pause?mode=keep") == {"status": "paused"}
    assert service.get("/is_paused").json == {"is_paused": True}
    assert host.llm.client.stats.num_running == 0
    assert host.llm.client.stats.kv_cache_usage == 0
    second = Running(service, max_tokens=5)  # waits as well
    eventually(lambda: host.llm.client.num_unfinished == 2)
    host.run(host.llm.look("test"))  # the core answers when it has both
    assert request.result is second.result is None
    order(service, "/resume")
    assert request.end()["text"] == expected["old"]
    assert second.end()["text"] == expected["old"][: len(second.result["text"])]
    assert service.get("/is_paused").json == {"is_paused": False}


@pytest.mark.nightly
def test_a_request_that_is_aborted_by_a_pause_ends_with_what_it_has(host, service, expected):
    request = Running(service)
    runs(host)
    order(service, "/pause")
    result = request.end()
    assert result["finish_reason"] == "abort"
    assert expected["old"].startswith(result["text"])
    assert result["text"] != expected["old"]
    order(service, "/resume")
    assert service.complete(**LONG)["choices"][0]["text"] == expected["old"]


@pytest.mark.slow
def test_a_pause_may_wait_for_the_requests_that_run(host, service, expected):
    request = Running(service)
    runs(host)
    order(service, "/pause?mode=wait&clear_cache=false")
    assert host.llm.client.stats.num_running == 0
    assert request.end()["text"] == expected["old"]
    order(service, "/resume")
    again = service.complete(**{**LONG, "max_tokens": 1})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.nightly
def test_a_pause_that_waits_is_answered_when_another_client_resumes(host, service):
    request = Running(service, max_tokens=900)
    runs(host)
    waiting = threading.Thread(target=order, args=(service, "/pause?mode=wait"))
    waiting.start()
    eventually(lambda: host.llm.client.stats.is_paused)
    order(service, "/resume")
    waiting.join(LONGEST)
    assert not waiting.is_alive()
    assert request.end()["finish_reason"] == "length"


def test_an_engine_sleeps_and_wakes_up(host, service, expected):
    for level in (1, 2):
        order(service, f"/sleep?level={level}&mode=keep")
        assert service.get("/is_sleeping").json == {"is_sleeping": True}
        waiting = Running(service, max_tokens=60)
        assert service.request("POST", "/resume").error["message"] == "the engine sleeps; wake it up"
        order(service, "/wake_up?tags=weights")
        assert service.get("/is_sleeping").json == {"is_sleeping": True}
        order(service, "/wake_up?tags=kv_cache")
        assert service.get("/is_sleeping").json == {"is_sleeping": False}
        says_the_beginning(waiting.end(), expected["old"])


@pytest.mark.nightly
def test_new_weights_are_taken_while_a_request_runs_and_the_cache_is_forgotten(host, service, expected, folder):
    other = {**LONG, "prompt": f"{TEXT} and {TEXT}", "max_tokens": 1}
    service.complete(**other)
    request = Running(service)
    runs(host)
    answer = service.post("/update_weights", {"path": "new"})
    assert (answer.status, answer.json) == (200, {"status": "updated"})
    text = request.end()["text"]
    assert text[:1] == expected["old"][:1]  # said with the old weights
    assert text != expected["old"]
    after = service.complete(**LONG)
    assert after["choices"][0]["text"] == expected["new"]
    assert service.complete(**other)["usage"]["prompt_tokens_details"]["cached_tokens"] == 16  # of what has run since
    refused = service.post("/update_weights", {"path": "missing"})
    assert refused.status == 400
    assert "missing: model.layers.0.mlp.down_proj.weight" in refused.error["message"]
    assert service.complete(**LONG)["choices"][0]["text"] == expected["new"]
    link = folder / "old"
    link.symlink_to(bundled_model())
    assert service.post("/update_weights", {"path": "old"}).status == 403  # it leads out of the folder
    link.unlink()
    shutil.copytree(bundled_model(), link)
    assert service.post("/update_weights", {"path": "old"}).status == 200
    assert service.complete(**LONG)["choices"][0]["text"] == expected["old"]


@pytest.mark.parametrize(
    ("path", "status"), [("../outside", 403), ("/etc", 403), ("nowhere", 404), ("new\0", 400), ("", 400)]
)
def test_only_folders_below_the_given_one_are_read(service, path, status):
    answer = service.post("/update_weights", {"path": path})
    assert answer.status == status
    assert answer.error["param"] == "path"


ORDERS = ["/pause", "/resume", "/sleep", "/wake_up"]


def test_orders_need_the_option_and_the_key(host, folder):
    closed = host.serve()
    for path in ORDERS:
        answer = closed.request("POST", path)
        assert (answer.status, "--enable-admin-api" in answer.error["message"]) == (403, True)
    place = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}
    for path, fields in (("/init_weights_update_group", place), ("/destroy_weights_update_group", {})):
        assert closed.post(path, fields).status == 403
    assert closed.post("/update_weights", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}).status == 403
    for path in ("/is_paused", "/is_sleeping"):
        assert closed.get(path).status == 403
    assert closed.post("/update_weights", {"path": "new"}).status == 403
    no_folder = host.serve(enable_admin_api=True)
    assert "--weights-folder" in no_folder.post("/update_weights", {"path": "new"}).error["message"]
    keyed = host.serve(enable_admin_api=True, weights_folder=str(folder), api_key=["secret"])
    assert {keyed.request("POST", path).status for path in ORDERS} == {401}
    assert keyed.get("/is_sleeping").status == 401
    assert keyed.get("/is_sleeping", Authorization="Bearer secret").json == {"is_sleeping": False}
    with pytest.raises(ConfigError, match="weights_folder needs enable_admin_api"):
        host.serve(weights_folder=str(folder))


@pytest.mark.parametrize("path", ["/pause?mode=now", "/sleep?level=3", "/sleep?level=x", "/wake_up?tags=graphs"])
def test_orders_that_have_no_meaning_are_refused(service, path):
    answer = service.request("POST", path)
    assert answer.status == 400, answer.body
    assert service.get("/is_paused").json == {"is_paused": False}


@pytest.mark.nightly
def test_a_trainer_sends_weights_while_a_request_runs(host, service, expected, folder):
    old = bundled_model()
    half = len(described(old)["names"]) // 2
    with Trainer(2) as trainer:
        request = Running(service)
        runs(host)
        assert service.post("/init_weights_update_group", trainer.place).json == {"status": "joined"}
        first, rest = (described(old)["names"][part] for part in (slice(half), slice(half, None)))
        answer = service.post("/update_weights", {**trainer.send(folder / "new", first), "last": False})
        assert (answer.status, answer.json) == (200, {"status": "received"})
        answer = service.post("/update_weights", {**trainer.send(folder / "new", rest), "flush_cache": False})
        assert (answer.status, answer.json) == (200, {"status": "updated"})
        says_the_beginning(service.complete(**{**LONG, "max_tokens": 60})["choices"][0], expected["new"])
        assert request.end()["text"][:1] == expected["old"][:1]
        order(service, "/pause?mode=keep")
        waiting = Running(service, max_tokens=60)
        typed = trainer.send(old)
        typed["dtypes"] = [f"torch.{dtype}" for dtype in typed["dtypes"]]
        assert service.post("/update_weights", typed).status == 200
        assert service.get("/is_paused").json == {"is_paused": True}
        order(service, "/resume")
        says_the_beginning(waiting.end(), expected["old"])
        assert service.post("/destroy_weights_update_group", {}).json == {"status": "destroyed"}
        refused = service.post("/update_weights", described(old))
        assert (refused.status, refused.error["param"]) == (400, "group_name")


@pytest.mark.slow
def test_requests_run_while_a_trainer_is_awaited(host, service, expected):
    with Trainer(2, "other") as trainer:  # which waits in a group of another name
        for seconds in (4, 20, 100):  # one is enough for a request on a machine of any speed
            answers: list[Any] = []
            place = {**trainer.place, "timeout": seconds}
            joining = threading.Thread(
                target=lambda place=place, answers=answers: answers.append(
                    service.post("/init_weights_update_group", place)
                )
            )
            joining.start()
            eventually(lambda: host.llm.client._asked)  # the core has the order to join
            assert service.complete(**{**LONG, "max_tokens": 20})["choices"][0]["text"]
            was_in_time = not answers
            joining.join()
            assert answers[0].status == 400
            problem = f"the group 'weight_update_group' was not joined in {seconds} s"
            assert problem in answers[0].error["message"]
            if was_in_time:
                break
        assert was_in_time


PLACE: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 9, "world_size": 2}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"master_address": "example.org"}, "master_address"),
        ({"master_port": 0}, "master_port"),
        ({"rank_offset": 2}, "world_size"),
        ({"backend": "mpi"}, "backend"),
        ({"backend": "nccl"}, "backend"),
        ({"timeout": 1e9}, "timeout"),
        ({"group_name": ""}, "group_name"),
    ],
)
def test_groups_that_have_no_meaning_are_refused(service, changes, param):
    answer = service.post("/init_weights_update_group", {**PLACE, **changes})
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, None),
        ({"path": "new", "names": ["a"]}, None),
        ({"names": []}, "names"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [["x"]]}, "shapes[0][0]"),
        ({"names": ["a"], "dtypes": ["float32"], "shapes": [[1 << 70]]}, "shapes[0][0]"),
    ],
)
def test_updates_that_have_no_meaning_are_refused(service, fields, param):
    answer = service.post("/update_weights", fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


async def ask(llm: AsyncLLM, name: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = [output async for output in llm.generate(TEXT, params, name)]
    return output.outputs[0].text


@pytest.mark.nightly
def test_all_replicas_take_weights_from_a_trainer_and_one_that_cannot_have_them_pauses(expected, folder):
    async def check() -> None:
        llm = AsyncLLM(**OPTIONS, data_parallel_size=2)
        await llm.start()
        with Trainer(3) as trainer:
            await llm.init_weights_update_group(**trainer.place)
            await llm.update_weights_from_distributed(**trainer.send(folder / "new"))
            assert [await ask(llm, "a"), await ask(llm, "b")] == [expected["new"]] * 2
            os.kill(llm.client.process_ids[0], signal.SIGKILL)
            while len(llm.client.ready) == 2:
                await asyncio.sleep(0.02)
            while len(llm.client.ready) < 2 or not llm.client.stats.is_paused:
                await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="there is no group"):
                await llm.update_weights_from_distributed(**trainer.send(folder / "new"))
        with Trainer(3) as trainer:
            await llm.init_weights_update_group(**trainer.place)
            await llm.update_weights_from_distributed(**trainer.send(folder / "new"))
            await llm.resume_generation()
            assert [await ask(llm, "c"), await ask(llm, "d")] == [expected["new"]] * 2
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(check(), LONGEST))


@pytest.mark.nightly
def test_a_core_that_replaces_a_lost_one_pauses_and_has_the_new_weights_as_the_others(expected, folder):
    async def lose_a_core(llm: AsyncLLM) -> None:
        os.kill(llm.client.process_ids[0], signal.SIGKILL)
        while len(llm.client.ready) == 2:
            await asyncio.sleep(0.02)
        while len(llm.client.ready) < 2:
            await asyncio.sleep(0.05)

    async def check() -> None:
        llm = AsyncLLM(**OPTIONS, data_parallel_size=2)
        await llm.start()
        assert [await ask(llm, "a"), await ask(llm, "b")] == [expected["old"]] * 2
        await llm.update_weights(str(folder / "new"))
        assert [await ask(llm, "c"), await ask(llm, "d")] == [expected["new"]] * 2
        with pytest.raises(ValueError, match="missing: "):
            await llm.update_weights(str(folder / "missing"))
        await lose_a_core(llm)
        assert [await ask(llm, "e"), await ask(llm, "f")] == [expected["new"]] * 2
        tasks = [asyncio.create_task(ask(llm, f"{i}")) for i in range(4)]
        while llm.client.stats.num_running < 4:
            await asyncio.sleep(0.01)
        await llm.pause_generation(mode="keep")
        await lose_a_core(llm)
        while not llm.client.stats.is_paused:
            await asyncio.sleep(0.01)
        while any(unfinished.core is None for unfinished in llm.client._unfinished.values()):
            await asyncio.sleep(0.01)
        await llm.look("test")  # the cores answer when they have all four
        assert not any(task.done() for task in tasks)
        await llm.resume_generation()
        assert await asyncio.gather(*tasks) == [expected["new"]] * 4
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(check(), LONGEST))
