"""Whether everybody can use the page: languages, the keyboard, narrow windows, screen readers."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

import pytest

from support.pages import MARKS, ask, until, until_drawn, visit
from support.server import Service, eventually

STATIC = files("quire.server.page").joinpath("static")
ROW = re.compile(r'^  "((?:[^"\\]|\\.)*)": \[(.*)\],$', re.MULTILINE)
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
TABS = ("#tab-chat", "#tab-models", "#tab-engine", "#tab-learn")


def table() -> dict[str, list[str]]:
    text = STATIC.joinpath("strings.js").read_text(encoding="utf-8")
    return {row[1]: TEXT.findall(row[2]) for row in ROW.finditer(text)}


def used() -> set[str]:
    """The texts that the page's code and document translate."""
    page = STATIC.joinpath("index.html").read_text(encoding="utf-8")
    found = {html.unescape(text).strip() for text in re.findall(r"<[^>]* data-t(?=[ >])[^>]*>([^<]+)<", page)}
    for name in ("placeholder", "aria-label", "data-hint"):
        found |= {html.unescape(text) for text in re.findall(rf' data-t-{name} {name}="([^"]*)"', page)}
    for path in STATIC.rglob("*.js"):
        if "vendor" not in path.parts:
            found |= set(re.findall(r'\bt\("((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8")))
    return found


def test_every_text_has_five_translations_with_the_same_values():
    rows = table()
    assert used() - rows.keys() == set()
    for text, translations in rows.items():
        assert len(translations) == 5, text
        names = sorted(re.findall(r"\{\w+\}", text))
        for translation in translations:
            assert translation.strip(), text
            assert sorted(re.findall(r"\{\w+\}", translation)) == names, translation


def marked(test: Any) -> Any:
    for mark in MARKS:
        test = mark(test)
    return test


@marked
def test_the_page_has_the_language_of_the_browser_or_the_chosen_one(browser: Any, server: Service):
    for locale, name in (("de-AT", "Senden"), ("es", "Enviar"), ("fr", "Envoyer"), ("ja", "送信"), ("zh-TW", "发送")):
        with visit(browser, server, locale=locale, viewport={"width": 360, "height": 740}) as page:
            assert page.locator("#send").text_content() == name
            assert page.get_attribute("html", "lang") == locale[:2]
            for tab in TABS:
                page.click(tab)
                until_drawn(page)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (locale, tab)
    with visit(browser, server, locale="pt") as page:
        assert page.locator("#send").text_content() == "Send"
        page.select_option("#language", "fr")
        page.locator("#send", has_text="Envoyer").wait_for()  # the page is loaded again


@marked
def test_a_narrow_window_and_the_dark(page: Any):
    ask(page, "Hi", max_tokens="10")
    page.set_viewport_size({"width": 360, "height": 740})
    for tab in TABS:
        page.click(tab)
        until_drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != light
    page.reload()
    assert page.evaluate("document.documentElement.classList.contains('dark')"), "the choice is kept"


@marked
def test_the_keyboard_is_enough(page: Any):
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#models")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.focus("#tab-chat")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator(".message.assistant .facts").wait_for()
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0
    eventually(lambda: page.locator("#conversations .title").count() == 1)
    assert page.evaluate("document.activeElement.id") == "prompt"


@marked
def test_axe_finds_nothing(page: Any):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check(what: str) -> None:
        until_drawn(page)
        results = axe.run(page)
        assert results.violations_count == 0, f"{what}: {results.generate_report()}"

    answer = "## Title\n\n| a | b |\n|---|---|\n| `c` | $x^2$ |\n\n```python\ndef f(): return 1  # one\n```\n\n> [link](https://a.org)"
    ask(page, "Hi", more=json.dumps({"structured_outputs": {"choice": [answer]}}))
    until(page, "document.querySelector('.formula') && document.querySelector('.hljs-keyword')")
    page.click("#theme")
    check("Markdown")
    page.click("#theme")
    check("Markdown")
    page.check("[name=logprobs]")
    ask(page, "Hi", max_tokens="20", more="").locator(".token").first.click()
    page.get_by_label("Actions for Hi").click()
    for tab in TABS:
        page.click(tab)
        page.wait_for_timeout(500)
        for _ in range(2):
            page.click("#theme")
            check(tab)
    page.click("#tab-chat")
    page.set_viewport_size({"width": 360, "height": 740})
    for drawer in ("#show-sidebar", "#show-options"):
        page.click(drawer)
        check(drawer)
        page.keyboard.press("Escape")
