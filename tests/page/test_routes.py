"""The page's files, headers and stream, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from quire.server.page import live
from support.server import Host, Service, eventually
from support.waiting import LONGEST

STATIC = Path(str(files("quire.server.page"))) / "static"
SERVED = (".html", ".css", ".js", ".svg", ".json", ".woff2")
NAMES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.suffix in SERVED)
OWN = [name for name in NAMES if not name.startswith("vendor/")]


class Viewer:
    """A client of the stream."""

    def __init__(self, server: Service, path: str = "/ui/events") -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.data, self.ended = b"", threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while part := self._socket.recv(1 << 16):
                self.data += part
                if self.data.endswith(b"0\r\n\r\n"):
                    break
        except OSError:
            pass
        self.ended.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line[6:])
            for line in self.data.split(b"\n")
            if line.startswith(b"data: ") and line.endswith(b"}")
        ]

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_the_page_and_its_files(server: Service):
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<title>Quire</title>" in page.body
    assert server.request("HEAD", "/").status == 200
    for name in NAMES:
        answer = server.get(f"/ui/{name}")
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert server.get("/ui/unknown.js").status == 404
    assert server.get("/ui/vendor/README.md").status == 404
    assert server.get("/ui/..%2f__init__.py").status == 404


@pytest.mark.parametrize("name", OWN)
def test_nothing_comes_from_outside_and_nothing_is_inline(name):
    text = (STATIC / name).read_text(encoding="utf-8")
    allowed = ("http://www.w3.org/2000/svg",)
    for quote in ('"', "'", "`", "("):
        for scheme in ("http://", "https://", "//"):
            for found in text.split(quote + scheme)[1:]:
                assert any((scheme + found).startswith(address) for address in allowed)
    if name.endswith(".html"):
        assert "style=" not in text
        assert "<style" not in text
        assert "onclick" not in text


def test_vendored_libraries_are_small_named_and_licensed():
    vendor = STATIC / "vendor"
    assert sum(path.stat().st_size for path in vendor.rglob("*") if path.is_file()) < 1.2e6
    table = (vendor / "README.md").read_text(encoding="utf-8")
    loaded = (STATIC / "vendor.js").read_text(encoding="utf-8")
    folders = [path for path in vendor.iterdir() if path.is_dir()]
    assert len(folders) == 4
    for folder in folders:
        assert (folder / "LICENSE").is_file()
        assert f"| {folder.name.rpartition('-')[2]} |" in table
        assert f"/{folder.name}" in loaded


def test_no_file_of_the_page_is_long():
    for name in OWN:
        if not name.endswith(".json"):
            assert len((STATIC / name).read_text(encoding="utf-8").splitlines()) <= 500, name


def test_all_viewers_see_the_same(server: Service, host: Host):
    viewers = [Viewer(server) for _ in range(3)]
    eventually(lambda: all(viewer.events for viewer in viewers))
    assert viewers[0].events[0]["is_whole"]
    server.complete("Once upon a time", max_tokens=50, ignore_eos=True)
    eventually(lambda: all(sum(len(e["views"][0]["steps"]) for e in viewer.events) >= 50 for viewer in viewers))
    steps = [{step["id"] for event in viewer.events for step in event["views"][0]["steps"]} for viewer in viewers]
    assert steps[0] == steps[1] == steps[2]
    late = Viewer(server)
    eventually(lambda: late.events)
    assert late.events[0]["is_whole"], "who comes late starts with the whole picture"
    assert late.events[0]["views"][0]["num_blocks"] == 299
    for viewer in (*viewers, late):
        viewer.close()
    state = server.app.state.live
    eventually(lambda: state._task.done())
    assert not state._viewers


def test_too_many_viewers_are_refused(server: Service, monkeypatch):
    monkeypatch.setattr(live, "MOST_VIEWERS", 1)
    viewer = Viewer(server)
    eventually(lambda: viewer.events)
    assert server.get("/ui/events").status == 503
    viewer.close()


def test_a_viewer_does_not_hold_up_the_end_of_the_server(host: Host):
    server = host.serve()
    viewer = Viewer(server)
    eventually(lambda: viewer.events)
    server.app.state.draining = True
    assert viewer.ended.wait(LONGEST)


def test_a_slow_viewer_starts_over_instead_of_filling_memory(server: Service, host: Host, monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(live, "_BEHIND", 3)
    state = server.app.state.live

    async def read_late() -> list[dict[str, Any]]:
        async with state.events() as stream:
            (queue,) = state._viewers
            sizes = [0]
            while not (3 in sizes and sizes[-1] < 3):
                await asyncio.sleep(0.001)
                sizes.append(queue.qsize())
            assert max(sizes) == 3, "older events are dropped"
            return [json.loads((await anext(stream)).removeprefix(b"data: ")) for _ in range(5)]

    assert any(event["is_whole"] for event in host.run(read_late()))


def test_the_key_protects_what_happens_and_not_the_files(host: Host):
    server = host.serve(api_key=["secret"])
    assert server.get("/").status == 200
    assert all(server.get(f"/ui/{name}").status == 200 for name in NAMES)
    assert server.get("/ui/events").status == 401
    assert server.get("/ui/about").status == 401
    assert server.get("/ui/about", Authorization="Bearer secret").json["models"] == ["demo"]


def test_the_page_can_be_switched_off(host: Host):
    server = host.serve(disable_ui=True)
    assert [server.get(path).status for path in ("/ui/app.js", "/ui/events", "/ui/about")] == [404] * 3
    assert server.get("/").body == b"Quire is running"  # Ollama answers so, too


def test_the_page_works_below_a_path(host: Host):
    server = host.serve(root_path="/llm")
    assert b"<title>Quire</title>" in server.get("/llm/").body
    assert server.get("/llm/ui/app.js").status == 200
    assert server.get("/llm/ui/about").status == 200
