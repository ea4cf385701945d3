"""The server's page in a real browser: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.server import Service, eventually

try:
    from playwright import sync_api
except ImportError:
    sync_api = None
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(sync_api is None, reason="Playwright is not installed"),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
    pytest.mark.xdist_group("browser"),
]
ALLOWED = ("status of 400", "status of 401", "status of 403")  # problems that tests provoke


@contextmanager
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visit(browser: Any, server: Service, **options: Any) -> Iterator[Any]:
    """A new visitor's page. Any error that the browser reports fails the test, and so does any request to others."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    context.set_default_timeout(120_000)  # milliseconds
    page, problems = context.new_page(), list[str]()
    own = (server.url, "data:", "blob:")
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(own) else problems.append(request.url))
    try:
        load(page, server.url)
        yield page
    finally:
        context.close()
    assert [text for text in problems if not any(part in text for part in ALLOWED)] == []


def load(page: Any, url: str) -> None:
    page.goto(url)
    until(page, "document.querySelector('#status').textContent")


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


def fill(page: Any, **fields: str) -> None:
    """Fill in options of the chat."""
    for name, value in fields.items():
        if name in ("schema", "tools", "more"):
            page.locator(f"details:has([name={name}])").evaluate("element => { element.open = true }")
        page.fill(f"[name={name}]", value)


def ask(page: Any, text: str, **fields: str) -> Any:
    """The last answer, when it has ended."""
    fill(page, **fields)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return last_answer(page)


def text_of(answer: Any) -> str:
    """The text of an answer, once all of it is shown: it is drawn from time to time, and first without its end."""
    answer.locator(".markdown[data-whole]").wait_for()
    return answer.locator(".markdown").inner_text()


def last_answer(page: Any) -> Any:
    """The last answer, when it has ended."""
    page.locator("#send:not([hidden])").wait_for()
    answers = page.locator(".message.assistant")
    answer = answers.nth(answers.count() - 1)
    answer.locator(".foot .facts, .problem").first.wait_for()
    return answer
