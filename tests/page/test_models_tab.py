"""The models tab, comparisons of two models, and the timeline of a request, in a real browser."""

from __future__ import annotations

import json
import re
from typing import Any

from support.pages import MARKS, ask, load, until, visit
from support.server import Host, Service, eventually

pytestmark = MARKS


def rows(page: Any) -> list[list[str]]:
    return [row.locator("th, td").all_text_contents() for row in page.locator("#models-list tr").all()]


def test_the_model_of_an_ordinary_server_is_listed(page: Any):
    ask(page, "Tell me a story.", max_tokens="200", more='{"ignore_eos": true}')
    page.click("#tab-models")
    page.locator("#models-list tr").wait_for()
    ((name, state, size, memory, parameters, context, speed, action),) = rows(page)
    assert (name, state, memory, context, action) == ("demo", "in memory", "–", "2,048", "")
    assert re.fullmatch(r"[\d.]+ MiB", size)
    assert parameters == "4.49M · BF16"
    assert "tokens/s, first after" in speed
    assert page.is_visible("#pull")
    page.fill("#pull-name", "no such model")
    page.click("#pull-start")
    page.locator("#models-problems .problem").wait_for()


def test_models_of_a_router_are_loaded_and_unloaded(page: Any):
    """With llama.cpp's protocol, which this server does not speak: its answers are given here."""
    states, asked = {"small": "loaded", "large": "unloaded"}, list[tuple[str, str]]()

    def answer(route: Any) -> None:
        path = route.request.url.rpartition("/models")[2]
        if path:
            name = route.request.post_data_json["model"]
            asked.append((path, name))
            states[name] = {"/load": "loading", "/unload": "unloaded"}[path]
            route.fulfill(json={"success": True})
            return
        data = [{"id": name, "status": {"value": state}, "memory": 1 << 20} for name, state in states.items()]
        route.fulfill(json={"data": data, "object": "list"})

    page.route(re.compile(r"^[^/]+//[^/]+(/v1)?/models(/load|/unload)?$"), answer)
    page.click("#tab-models")
    page.get_by_role("button", name="Load: large").click()
    eventually(lambda: ["large", "being loaded"] in [row[:2] for row in rows(page)])
    assert page.get_by_role("button", name="Load: large").is_disabled()
    states["large"] = "loaded"
    page.get_by_role("button", name="Unload: large").wait_for()
    page.get_by_role("button", name="Unload: small").click()
    eventually(lambda: ["small", "on disk"] in [row[:2] for row in rows(page)])
    assert asked == [("/load", "large"), ("/unload", "small")]


def test_a_download_shows_its_progress(page: Any):
    lines = [
        {"status": "pulling manifest"},
        {"status": "pulling a", "digest": "a", "total": 3 << 20, "completed": 1 << 20},
        {"status": "pulling b", "digest": "b", "total": 1 << 20, "completed": 1 << 20},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    page.evaluate(
        """text => {
        const { fetch } = window;
        window.fetch = (path, options) => path !== "api/pull" ? fetch(path, options) : Promise.resolve(new Response(
            new ReadableStream({ start(stream) {
                window.send = (part) => stream.enqueue(new TextEncoder().encode(part));
                window.end = () => stream.close();
                window.send(text);
                options.signal.addEventListener("abort", () => stream.error(new DOMException("x", "AbortError")));
            } })));
    }""",
        text,
    )
    page.click("#tab-models")
    page.fill("#pull-name", "owner/name")
    page.click("#pull-start")
    eventually(lambda: page.locator("#pull-text").text_content().startswith("owner/name: 2.0 MiB of 4.0 MiB"))
    assert page.evaluate("document.querySelector('#pull-bar').position") == 0.5
    page.evaluate('window.send(\'{"status": "success"}\\n\'); window.end()')
    eventually(lambda: page.locator("#pull-text").text_content() == "owner/name was downloaded.")
    page.fill("#pull-name", "owner/other")
    page.click("#pull-start")
    page.click("#pull-stop")
    until(page, "document.querySelector('#pull-stop').hidden")
    assert page.locator("#models-problems .problem").count() == 0


def test_two_models_answer_side_by_side(browser: Any, host: Host):
    with visit(browser, host.serve(served_model_name=["one", "two"])) as page:
        page.select_option("[name=other]", "two")
        ask(page, "Hello", max_tokens="12", temperature="0")
        pair = page.locator(".pair .message.assistant")
        eventually(lambda: pair.locator(".facts").count() == 2)
        assert pair.locator(".model").all_text_contents() == ["one", "two"]
        first, second = pair.nth(0).bounding_box(), pair.nth(1).bounding_box()
        assert first["x"] + first["width"] <= second["x"]
        assert abs(first["y"] - second["y"]) < 1
        pair.nth(1).get_by_role("button", name="Go on with this answer").click()
        until(page, "document.querySelectorAll('.message.other')[0]?.querySelector('.model').textContent === 'one'")
        page.select_option("[name=other]", "")
        ask(page, "And then?")
        load(page, page.url.partition("#")[0])
        until(page, "document.querySelectorAll('.message').length === 5")
        assert page.locator(".pair .other .model").text_content() == "one", "the choice is kept"


def test_the_timeline_tells_why_a_request_took_its_time(page: Any, server: Service):
    page.click("#tab-engine")
    page.check("#keep-recording")
    page.locator(".core canvas").first.wait_for()
    page.click("#tab-chat")
    answer = ask(page, "Tell me a story. " * 40, max_tokens="30")
    link = answer.get_by_role("button", name="Why did this take so long?")
    link.wait_for()
    link.click()
    assert page.is_visible("#engine")
    eventually(lambda: re.match(r"It took .* The longest part was “", page.locator("#lives > .facts").text_content()))
    names = page.locator("#lives .lane strong").all_text_contents()
    assert names[:3] == ["Queue", "Prompt", "Output"]
    lanes = page.locator("#lives .lanes")
    eventually(lambda: "30 tokens, steps: 30" in lanes.text_content())  # its last events may come later
    assert re.search(r"\d+ tokens, chunks: \d+", lanes.text_content())
    page.uncheck("#keep-recording")
    page.click("#tab-chat")
    eventually(lambda: not server.app.state.live._viewers)
