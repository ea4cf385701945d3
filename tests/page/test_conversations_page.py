"""Conversations in a real browser: stored, searched, renamed, exported, with branches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.pages import MARKS, ask, last_answer, load, until
from support.server import Service, eventually

pytestmark = MARKS


def say(page: Any, text: str) -> Any:
    """The model's answer, which is the text."""
    return ask(page, f"Say {text}", more=json.dumps({"structured_outputs": {"choice": [text]}}))


def texts(page: Any) -> list[str]:
    """The visible messages."""
    return page.locator(".message .text, .message .markdown").all_inner_texts()


def titles(page: Any) -> list[str]:
    return page.locator("#conversations .title").all_text_contents()


def act(page: Any, title: str, action: str) -> None:
    """Choose from a conversation's menu."""
    page.get_by_label(f"Actions for {title}").click()
    page.locator(".menu[open]").get_by_role("button", name=action).click()


def test_conversations_survive_a_reload(page: Any, server: Service):
    say(page, "one")
    say(page, "two")
    eventually(lambda: texts(page) == ["Say one", "one", "Say two", "two"])
    page.click("#new")
    assert texts(page) == []
    say(page, "three")
    load(page, server.url)
    eventually(lambda: texts(page) == ["Say three", "three"])
    eventually(lambda: titles(page) == ["Say three", "Say one"])
    page.locator("#conversations .title").nth(1).click()
    eventually(lambda: texts(page) == ["Say one", "one", "Say two", "two"])
    eventually(lambda: page.locator("#conversations [aria-current]").text_content() == "Say one")
    assert "prompt tokens" in page.locator(".message .facts").last.text_content(), "figures are kept"
    page.fill("#prompt", "a draft")
    load(page, server.url)
    assert page.input_value("#prompt") == "a draft"


def test_an_unfinished_answer_survives_a_reload(page: Any, server: Service):
    page.fill("[name=max_tokens]", "1900")
    page.locator("details:has([name=more])").evaluate("element => { element.open = true }")
    page.fill("[name=more]", '{"ignore_eos": true}')
    page.fill("#prompt", "Tell me a story.")
    page.press("#prompt", "Enter")
    stored = """(async () => {
        const { list, messagesOf } = await import("/ui/chat/store.js");
        const messages = await messagesOf((await list())[0]?.id);
        return messages.find(({ role, text }) => role === "assistant" && text)?.text ?? "";
    })()"""
    eventually(lambda: page.evaluate(stored))
    load(page, server.url)
    answer = page.locator(".message.assistant .markdown")
    answer.wait_for()
    eventually(lambda: len(answer.inner_text()) > 5)
    assert "stopped" in page.locator(".message .facts").text_content()


def test_conversations_are_found_renamed_and_deleted(page: Any):
    say(page, "apple")
    page.click("#new")
    say(page, "pear")
    page.fill("#search", "PEA")
    eventually(lambda: titles(page) == ["Say pear"])
    page.fill("#search", "")
    eventually(lambda: len(titles(page)) == 2)
    act(page, "Say pear", "Rename")
    page.keyboard.type("Fruit")
    page.keyboard.press("Enter")
    eventually(lambda: titles(page) == ["Fruit", "Say apple"])
    say(page, "plum")
    assert titles(page) == ["Fruit", "Say apple"], "the name is kept"
    act(page, "Fruit", "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert titles(page) == ["Fruit", "Say apple"]
    act(page, "Fruit", "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    eventually(lambda: titles(page) == ["Say apple"])
    assert texts(page) == [], "it was open"


def test_messages_have_branches(page: Any, server: Service):
    say(page, "one")
    page.fill("[name=more]", '{"structured_outputs": {"choice": ["uno"]}}')
    page.get_by_role("button", name="Try again").click()
    last_answer(page)
    eventually(lambda: texts(page) == ["Say one", "uno"])
    page.get_by_role("button", name="Previous version").click()
    eventually(lambda: texts(page) == ["Say one", "one"])
    assert page.locator(".branches").text_content() == "‹1/2›"
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.locator(".editor textarea").fill("Say it in French")
    page.fill("[name=more]", '{"structured_outputs": {"choice": ["un"]}}')
    page.locator(".editor").get_by_role("button", name="Send").click()
    until(page, "document.querySelector('.message.user .text')?.textContent === 'Say it in French'")
    last_answer(page)
    eventually(lambda: texts(page) == ["Say it in French", "un"])
    load(page, server.url)
    eventually(lambda: texts(page) == ["Say it in French", "un"])
    page.get_by_role("button", name="Previous version").click()
    eventually(lambda: texts(page) == ["Say one", "one"])
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.locator(".editor textarea").wait_for()
    page.keyboard.press("Escape")
    eventually(lambda: texts(page) == ["Say one", "one"])


def test_conversations_are_exported_and_imported(page: Any, tmp_path: Path):
    say(page, "one")
    page.fill("[name=more]", '{"structured_outputs": {"choice": ["uno"]}}')
    page.get_by_role("button", name="Try again").click()
    last_answer(page)
    files = {}
    for name, action in (("json", "Export as JSON"), ("md", "Export as Markdown")):
        with page.expect_download() as download:
            act(page, "Say one", action)
        assert download.value.suggested_filename == f"Say one.{name}"
        files[name] = tmp_path / f"one.{name}"
        download.value.save_as(files[name])
    (exported,) = json.loads(files["json"].read_text())["conversations"]
    assert [message["text"] for message in exported["messages"]].count("uno") == 1
    assert files["md"].read_text().startswith("# Say one\n\n<!-- quire user -->\n## You\n\nSay one\n")
    (tmp_path / "wrong.json").write_text('{"format": "something"}')
    page.set_input_files("#import-file", [files["json"], files["md"], tmp_path / "wrong.json"])
    eventually(lambda: titles(page) == ["Say one"] * 3)
    page.locator("#messages > .problem").wait_for()
    assert "wrong.json cannot be imported" in page.locator("#messages > .problem").text_content()
    for number in range(3):
        page.locator("#conversations .title").nth(number).click()
        until(page, f"document.querySelectorAll('#conversations .title')[{number}].ariaCurrent")
        eventually(lambda: texts(page) == ["Say one", "uno"])
