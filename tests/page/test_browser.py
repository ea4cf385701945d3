"""The engine's view, and the page as a whole, in a real browser."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pages import MARKS, ask, text_of, until
from support.server import Host, Service, eventually
from support.waiting import LONGEST

pytestmark = MARKS
TEXT = "Once upon a time there was a fox who lived near a river. "


@contextlib.contextmanager
def load(server: Service, count: int = 6) -> Iterator[None]:
    """Some requests at all times."""
    ends = threading.Event()

    def work(number: int) -> None:
        while not ends.is_set():
            server.complete(TEXT * (1 + number * 3 % 7), max_tokens=80, ignore_eos=True, seed=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_the_map_changes_under_load(page: Any, server: Service):
    page.click("#tab-engine")
    page.locator(".core canvas").first.wait_for()
    picture = "document.querySelector('.core canvas').toDataURL()"
    eventually(lambda: "0 of 299 blocks" in page.locator(".core .facts").first.text_content())
    before = page.evaluate(picture)
    with load(server):
        until(page, "document.querySelectorAll('.requests tbody tr').length > 3")
        eventually(lambda: page.evaluate(picture) != before)
        until(page, "/[1-9]/.test(document.querySelector('.numbers dd').textContent)")
        page.locator(".core canvas").first.hover(position={"x": 4, "y": 4})
        page.locator("#tip:not([hidden])").wait_for()
        assert page.locator("#tip").text_content().startswith("Block 1: ")
    page.locator(".core .hint").first.hover()
    assert "What this replica does now" in page.locator("#tip").text_content()


@pytest.mark.nightly
def test_tiers_and_ranks_are_drawn(browser: Any, tmp_path: Path):
    host = Host(
        dtype="float32",
        max_num_seqs=4,
        num_gpu_blocks_override=130,
        pipeline_parallel_size=2,
        kv_offloading_size=0.02,
        kv_offloading_path=str(tmp_path / "kv"),
        kv_offloading_disk_size="60M",
    )
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    try:
        server = host.serve()
        page.goto(f"{server.url}/#engine")
        page.locator(".tier").nth(1).wait_for()
        memory, disk = page.locator(".tier").all()
        assert memory.locator("h3").text_content() == "CPU memory"
        assert disk.locator("h3").text_content() == "Disk"
        with load(server, 4):
            for tier in (memory, disk):
                eventually(lambda tier=tier: re.search(r"[1-9]\d* saved", tier.locator(".facts").last.text_content()))
                assert re.search(r"^[1-9]\d* of .* blocks: .* of .* MiB", tier.locator(".facts").first.text_content())
            box = memory.locator("canvas").first.bounding_box()
            page.mouse.move(box["x"] + 4, box["y"] + 4)
            page.locator("#tip:not([hidden])").wait_for()
            assert page.locator("#tip").text_content().startswith("Place 1: ")
            box = memory.locator("canvas").last.bounding_box()
            page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
            eventually(lambda: re.search(r"\d+ blocks loaded, \d+ saved", page.locator("#tip").text_content()))
            assert page.locator(".stage h3").all_text_contents() == ["Stage 1 of 2", "Stage 2 of 2"]
            assert page.locator(".rank h4").all_text_contents() == ["Rank 0", "Rank 1"]
            values = page.locator(".rank .value").all_text_contents
            eventually(lambda: re.fullmatch(r"[\d.]+ MiB \d+\.\d\d", " ".join(values()[:2])))
            page.locator(".rank .line").nth(3).hover()
            assert page.locator("#tip").text_content().startswith("The process of rank 1 used ")
            page.set_viewport_size({"width": 360, "height": 740})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
            results = axe.run(page)
            assert results.violations_count == 0, results.generate_report()
    finally:
        page.close()
        host.close()


@pytest.mark.nightly
def test_replicas_are_beside_each_other(browser: Any):
    host = Host(dtype="float32", max_num_seqs=4, num_gpu_blocks_override=130, data_parallel_size=2)
    page = browser.new_page()
    try:
        server = host.serve()
        page.goto(f"{server.url}/#engine")
        with load(server, 4):
            page.locator(".replicas .line").nth(3).wait_for()
            eventually(lambda: re.search(r"[1-9]\d* % in use", page.locator(".replicas").text_content()))
            page.locator(".replicas .line").nth(2).hover()
            assert page.locator("#tip").text_content().startswith("Replica 1 uses ")
        assert page.locator("#cores .core").count() == 2
    finally:
        page.close()
        host.close()


def test_nothing_is_asked_of_the_engine_while_the_tab_is_hidden(page: Any, server: Service):
    live = server.app.state.live
    assert not live._viewers
    page.click("#tab-engine")
    eventually(lambda: live._viewers)
    page.click("#tab-chat")
    eventually(lambda: not live._viewers)


@pytest.mark.nightly
def test_recorded_runs_are_played(page: Any):
    page.click("#tab-learn")
    page.locator("#blocks li").first.wait_for()
    for name, words in (
        ("batching", "computes its whole prompt"),
        ("chunks", "a chunk of its prompt"),
        ("sharing", "are there already, in blocks that can be found"),
        ("preemption", "gives back its blocks and waits"),
        ("speculation", "All of them are what the model says"),
    ):
        page.select_option("#run", name)
        assert page.locator("#place").text_content().startswith("step 1 of ")
        told = [page.locator("#story").text_content()]
        while page.is_enabled("#next"):
            page.click("#next")
            told.append(page.locator("#story").text_content())
        assert any(words in text for text in told), name
    page.click("#play")
    until(page, "document.querySelector('#place').textContent.startsWith('step 2 of ')")
    page.click("#play")


def test_the_key_is_asked_for(host: Host, browser: Any):
    server = host.serve(api_key=["secret"])
    page = browser.new_page()
    page.set_default_timeout(1000 * LONGEST)
    page.goto(server.url)
    page.locator("#key-form").wait_for()
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    until(page, "document.querySelector('#status').textContent")
    assert text_of(ask(page, "Hi", max_tokens="5"))
    page.close()
