"""The page in a real browser: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from support.server import Host, Service, eventually
from support.waiting import LONGEST

try:
    from playwright import sync_api
except ImportError:
    sync_api = None
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sync_api is None, reason="Playwright is not installed"),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
    pytest.mark.xdist_group("browser"),
]
TEXT = "Once upon a time there was a fox who lived near a river. "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server: Service) -> Iterator[Any]:
    """A new visitor's page. Any error that the browser reports fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(1000 * LONGEST)
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(server.url)
    until(page, "document.querySelector('#status').textContent")
    yield page
    context.close()
    allowed = ("status of 400", "status of 401")
    assert [text for text in problems if not any(part in text for part in allowed)] == []


def until(page: Any, expression: str) -> None:
    """Playwright's own wait_for_function is forbidden by the page's Content-Security-Policy."""
    eventually(lambda: page.evaluate(expression), expression)


def until_drawn(page: Any) -> None:
    """Until a click has its effect: changes of style have ended, and a frame with them has been drawn."""
    page.evaluate("""async () => {
        const frame = () => new Promise(requestAnimationFrame);
        await frame();
        const changes = document.getAnimations().filter(one => one instanceof CSSTransition);
        await Promise.allSettled(changes.map(one => one.finished));
        await frame();
    }""")


def ask(page: Any, text: str, **fields: str) -> Any:
    """The answer, when it has ended."""
    for name, value in fields.items():
        if name in ("schema", "tools", "more"):
            page.locator(f"details:has([name={name}])").evaluate("element => { element.open = true }")
        page.fill(f"[name={name}]", value)
    before = page.locator(".message.assistant").count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    answer = page.locator(".message.assistant").nth(before)
    answer.locator(".facts, .problem").first.wait_for()
    return answer


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


def test_an_answer_is_streamed_with_the_likelihood_of_its_tokens(page: Any, server: Service):
    answer = ask(page, "Tell me a story.", max_tokens="40", temperature="0")
    expected = server.chat("Tell me a story.", max_tokens=40, temperature=0)
    text = answer.locator(".text").first.text_content()
    assert text == expected["choices"][0]["message"]["content"]
    assert answer.locator(".token").count() == expected["usage"]["completion_tokens"]
    facts = answer.locator(".facts").text_content()
    assert re.search(r"first token after .* tokens a second .* tokens of prompt.* of answer", facts)
    answer.locator(".token").nth(3).click()
    table = answer.locator(".choices")
    assert "Token 4 of" in table.text_content()
    assert table.locator("tbody tr").count() >= 5
    assert table.locator("tr.chosen").count() == 1
    answer.locator(".text[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    assert "Token 5 of" in answer.locator(".choices").text_content()
    again = ask(page, "And then?")
    assert again.locator(".text").first.text_content()
    assert page.locator(".message").count() == 4
    assert not page.is_visible("#attach"), "the model takes no pictures"


def test_the_end_of_the_conversation_is_seen_on_a_narrow_screen(browser: Any, server: Service):
    page = browser.new_page(viewport={"width": 390, "height": 780})
    try:
        page.goto(server.url)
        until(page, "document.querySelector('#status').textContent")
        for _ in range(5):
            end = ask(page, "Hello!").bounding_box()
        assert 0 < end["y"] + end["height"] <= page.locator("#ask").bounding_box()["y"] + 1
    finally:
        page.close()


CLICK_STOP = """new Promise(done => (function look() {
    if (document.querySelectorAll(".token").length <= 5) return setTimeout(look, 5);
    document.querySelector("#stop").click();
    done();
})())"""


def test_an_answer_can_be_stopped(page: Any, host: Host):
    page.fill("[name=max_tokens]", "1500")
    page.locator("details:has([name=more])").evaluate("element => { element.open = true }")
    page.fill("[name=more]", '{"ignore_eos": true}')
    page.fill("#prompt", "Tell me a very long story.")
    page.press("#prompt", "Enter")
    page.evaluate(CLICK_STOP)  # in the page, since the answer might end while a click makes its way there
    page.locator(".message.assistant .facts").wait_for()
    assert "stopped" in page.locator(".message.assistant .facts").text_content()
    assert page.is_enabled("#send")
    eventually(lambda: host.is_idle)


def test_a_schema_is_followed(page: Any):
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "crow"]}},
        "required": ["animal"],
        "additionalProperties": False,
    }
    answer = ask(page, "Which animal?", schema=json.dumps(schema), max_tokens="60")
    assert json.loads(answer.locator(".text").first.text_content())["animal"] in ("fox", "crow")


def test_errors_are_shown_and_name_the_field(page: Any):
    answer = ask(page, "Hello", temperature="-3")
    assert "temperature" in answer.locator(".problem").text_content()
    page.fill("[name=temperature]", "")
    page.locator("details:has([name=schema])").evaluate("element => { element.open = true }")
    page.fill("[name=schema]", "{nothing")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    page.locator("#messages > .problem").wait_for()
    assert "The JSON schema is not valid JSON" in page.locator("#messages > .problem").text_content()
    assert page.input_value("#prompt") == "Hello", "what was typed is kept"


def test_a_request_can_be_copied_and_runs(page: Any, server: Service, browser: Any, tmp_path):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("[name=max_tokens]", "5")
    page.fill("[name=temperature]", "0")
    page.fill("#prompt", "It's a fox.")
    page.click("#copy-python")
    until(page, "document.querySelector('#copy-python').textContent === 'Copied'")
    code = page.evaluate("navigator.clipboard.readText()")
    assert "client.chat.completions.create(" in code
    compile(code, "copied", "exec")
    page.click("#copy-curl")
    until(page, "document.querySelector('#copy-curl').textContent === 'Copied'")
    command = page.evaluate("navigator.clipboard.readText()")
    if shutil.which("curl"):
        done = subprocess.run(["sh", "-c", command.replace("curl ", "curl -s ", 1)], capture_output=True, check=True)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 5


def test_pictures_are_attached(browser: Any, tmp_path: Path):
    for name, colour in (("sun", "yellow"), ("ball", "red")):
        picture = Image.new("RGB", (200, 200), "white")
        ImageDraw.Draw(picture).ellipse((50, 40, 150, 140), fill=colour)
        picture.save(tmp_path / f"{name}.png")
    host = Host(model="quire-demo/vision", max_num_seqs=4, num_gpu_blocks_override=200)
    page = browser.new_page()
    try:
        page.goto(host.serve().url)
        until(page, "document.querySelector('#status').textContent")
        assert page.is_visible("#attach")
        page.set_input_files("#files", [tmp_path / "sun.png", tmp_path / "ball.png"])
        page.locator("#ask .pictures img").nth(1).wait_for()
        page.get_by_role("button", name="Remove picture sun.png").click()
        assert page.locator("#ask .pictures img").count() == 1
        answer = ask(page, "What colour is it?", temperature="0", max_tokens="30")
        assert "red" in answer.locator(".text").first.text_content()
        shown = page.locator(".message.user .pictures img")
        assert shown.get_attribute("alt") == "Picture ball.png"
        assert shown.evaluate("image => image.naturalWidth") == 200
        assert not page.is_visible("#pictures"), "the next message has none"
        assert "1" in ask(page, "How many are there?").locator(".text").first.text_content(), "it is still seen"
        (tmp_path / "text.png").write_text("no picture")
        page.set_input_files("#files", tmp_path / "text.png")
        page.locator("#ask .pictures img").wait_for()
        refused = ask(page, "And this?").locator(".problem").text_content()
        assert "no image in a known format" in refused
        assert ask(page, "What is it?").locator(".problem").count() == 0, "what was refused is not sent again"
    finally:
        page.close()
        host.close()


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
        box = page.locator(".core canvas").first.bounding_box()
        page.mouse.move(box["x"] + 4, box["y"] + 4)
        page.locator("#tip:not([hidden])").wait_for()
        assert page.locator("#tip").text_content().startswith("Block 1: ")
    page.locator(".hint").first.hover()
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
    page.click("#tab-playground")
    eventually(lambda: not live._viewers)


def test_a_narrow_window_and_the_dark(page: Any, server: Service):
    ask(page, "Hi", max_tokens="10")
    page.set_viewport_size({"width": 360, "height": 740})
    for tab in ("#tab-playground", "#tab-engine", "#tab-learn"):
        page.click(tab)
        until_drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != light
    page.reload()
    assert page.evaluate("document.documentElement.classList.contains('dark')"), "the choice is kept"


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


def test_tabs_work_with_the_keyboard(page: Any):
    page.focus("#tab-playground")
    page.keyboard.press("ArrowRight")
    assert page.locator("#engine").is_visible()
    assert page.evaluate("document.activeElement.id") == "tab-engine"


def test_the_key_is_asked_for(host: Host, browser: Any):
    server = host.serve(api_key=["secret"])
    page = browser.new_page()
    page.set_default_timeout(1000 * LONGEST)
    page.goto(server.url)
    page.locator("#key-form").wait_for()
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    until(page, "document.querySelector('#status').textContent")
    assert ask(page, "Hi", max_tokens="5").locator(".text").first.text_content()
    page.close()


def test_axe_finds_nothing(page: Any, server: Service):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    ask(page, "Hi", max_tokens="20").locator(".token").first.click()
    with load(server, 2):
        for tab in ("#tab-playground", "#tab-engine", "#tab-learn"):
            page.click(tab)
            for _ in range(2):
                page.click("#theme")
                until_drawn(page)
                results = axe.run(page)
                assert results.violations_count == 0, results.generate_report()
