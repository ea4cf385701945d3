"""The chat in a real browser: answers, options, tools, attached files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from support.dictation import THOUGHT, Parrot
from support.pages import MARKS, ask, fill, last_answer, load, text_of, until, visit
from support.server import Host, Service, eventually

pytestmark = MARKS
STORY = " ".join(["Tell me a story."] * 5)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
DROP = """([target, name, type, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, { type }));
    const place = document.querySelector(target);
    if (target === "#prompt") place.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
    else place.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def test_an_answer_is_streamed_with_its_figures(page: Any, server: Service):
    answer = ask(page, STORY, max_tokens="40", temperature="0")
    expected = server.chat(STORY, max_tokens=40, temperature=0)
    eventually(lambda: answer.locator(".markdown").inner_text() == expected["choices"][0]["message"]["content"])
    assert answer.locator(".token").count() == 0, "the likelihood of tokens is not asked for"
    facts = answer.locator(".facts").text_content()
    assert re.search(r"^first token after .* · .* tokens/s · \d+ prompt tokens.* · 40 output tokens · cut off", facts)
    page.get_by_role("button", name="Try again").click()
    again = last_answer(page)
    assert "cached" in again.locator(".facts").text_content()
    assert text_of(ask(page, "And then?"))
    assert page.locator(".message").count() == 4
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".message.user").first.get_by_role("button", name="Copy").click()
    eventually(lambda: page.evaluate("navigator.clipboard.readText()") == STORY)


def test_the_likelihood_of_tokens_is_shown_if_asked_for(page: Any, server: Service):
    page.check("[name=logprobs]")
    answer = ask(page, "Tell me a story.", max_tokens="40", temperature="0")
    expected = server.chat("Tell me a story.", max_tokens=40, temperature=0)
    text = answer.locator(".heat .text").text_content()
    assert text == expected["choices"][0]["message"]["content"]
    assert answer.locator(".token").count() == expected["usage"]["completion_tokens"]
    answer.locator(".token").nth(3).click()
    table = answer.locator("table.choices")
    assert "Token 4 of" in table.text_content()
    assert table.locator("tbody tr").count() >= 5
    assert table.locator("tr.chosen").count() == 1
    answer.locator(".text[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    assert "Token 5 of" in table.text_content()
    answer.get_by_role("button", name="Formatted text").click()
    eventually(lambda: answer.locator(".markdown").inner_text() == text)
    assert answer.locator(".token").count() == 0


CLICK_STOP = """new Promise(done => (function look() {
    const shown = document.querySelector(".message.assistant .markdown")?.textContent ?? "";
    if (shown.length <= 20) return setTimeout(look, 5);
    document.querySelector("#stop").click();
    done();
})())"""


def test_an_answer_can_be_stopped_and_continued(page: Any, host: Host):
    fill(page, max_tokens="1500", temperature="0", more='{"ignore_eos": true}')
    page.fill("#prompt", "Tell me a very long story.")
    page.press("#prompt", "Enter")
    page.evaluate(CLICK_STOP)  # in the page, since the answer might end while a click makes its way there
    answer = last_answer(page)
    assert "stopped" in answer.locator(".facts").text_content()
    eventually(lambda: host.is_idle)
    before = text_of(answer)
    fill(page, max_tokens="10")
    answer.get_by_role("button", name="Continue").click()
    after = text_of(last_answer(page))
    assert len(after) > len(before)
    assert after.startswith(before)
    assert page.locator(".message").count() == 2


def test_a_schema_is_followed(page: Any):
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "crow"]}},
        "required": ["animal"],
        "additionalProperties": False,
    }
    answer = ask(page, "Which animal?", schema=json.dumps(schema), max_tokens="60")
    assert json.loads(text_of(answer))["animal"] in ("fox", "crow")


def test_errors_are_shown_and_name_the_field(page: Any):
    answer = ask(page, "Hello", temperature="-3")
    assert "temperature" in answer.locator(".problem").text_content()
    fill(page, temperature="", schema="{nothing")
    page.fill("#prompt", "Hello")
    page.press("#prompt", "Enter")
    page.locator("#messages > .problem").wait_for()
    assert "The JSON schema is not valid JSON" in page.locator("#messages > .problem").text_content()
    assert page.input_value("#prompt") == "Hello", "what was typed is kept"


def test_a_required_call_is_a_card_that_takes_its_result(page: Any):
    fill(page, tools=json.dumps(TOOLS), temperature="0", max_tokens="60", more='{"parallel_tool_calls": false}')
    page.check("[name=logprobs]")
    page.select_option("[name=tool_choice]", "required")
    answer = ask(page, "How is the weather?")
    assert answer.locator(".body").inner_text() == "", "the call's JSON is not the answer's text"
    card = answer.locator(".call")
    assert card.locator(".call-head").inner_text() == "⚙ weather"
    assert json.loads(card.locator(".code code").text_content())["city"] in ("Paris", "Rome")
    assert card.locator(".code code").text_content().count("\n") == 2
    page.select_option("[name=tool_choice]", "none")
    card.get_by_label("Result").fill("It rains.")
    answer.get_by_role("button", name="Send results").click()
    until(page, "document.querySelectorAll('.message.assistant').length === 2")
    last_answer(page)
    assert card.locator(".result").text_content() == "ResultIt rains."
    assert page.locator(".message").count() == 3


def test_thinking_is_folded_with_its_duration(browser: Any):
    options = {"max_num_seqs": 4, "num_gpu_blocks_override": 200}
    host = Host(dtype="float32", logits_processors=[Parrot], reasoning_parser="qwen3", **options)
    try:
        with visit(browser, host.serve()) as page:
            answer = ask(page, THOUGHT)
            eventually(lambda: answer.locator(".markdown").inner_text() == "I will look.")
            assert re.fullmatch(r"Thought for [\d.]+ m?s", answer.locator("summary").text_content())
            assert not answer.locator(".thoughts .text").is_visible()
            answer.locator("summary").click()
            assert answer.locator(".thoughts .text").inner_text().strip() == "It is a city."
            with page.expect_request("**/v1/chat/completions") as sent:
                ask(page, "And then?")
            assert sent.value.post_data_json["messages"][1]["content"].strip() == "I will look."
    finally:
        host.close()


def test_a_request_can_be_copied_and_runs(page: Any):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    fill(page, max_tokens="5", temperature="0")
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


def test_text_files_are_attached_by_pasting_and_dropping(page: Any, server: Service):
    page.evaluate(DROP, ["#prompt", "fox.txt", "text/plain", "The fox is red."])
    page.evaluate(DROP, ["#messages", "crow.py", "", "crow = 'black'"])
    page.locator("#attachments .file").nth(1).wait_for()
    page.evaluate(DROP, ["#messages", "sun.png", "image/png", "x"])
    page.locator("#messages > .problem").wait_for()
    assert page.locator("#messages > .problem").text_content() == "This model takes no pictures."
    page.get_by_role("button", name="Remove crow.py").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Which colour?", max_tokens="5")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert content == "fox.txt:\n\n````\nThe fox is red.\n````\n\nWhich colour?"
    assert page.locator(".message.user .file").text_content() == "▤ fox.txt"
    assert not page.is_visible("#attachments"), "the next message has none"


def test_pictures_are_attached(browser: Any, tmp_path: Path):
    for name, colour in (("sun", "yellow"), ("ball", "red")):
        picture = Image.new("RGB", (200, 200), "white")
        ImageDraw.Draw(picture).ellipse((50, 40, 150, 140), fill=colour)
        picture.save(tmp_path / f"{name}.png")
    host = Host(model="quire-demo/vision", max_num_seqs=4, num_gpu_blocks_override=200)
    try:
        with visit(browser, host.serve()) as page:
            page.set_input_files("#files", [tmp_path / "sun.png", tmp_path / "ball.png"])
            page.locator("#attachments img").nth(1).wait_for()
            page.get_by_role("button", name="Remove sun.png").click()
            assert page.locator("#attachments img").count() == 1
            answer = ask(page, "What colour is it?", temperature="0", max_tokens="30")
            assert "red" in text_of(answer)
            shown = page.locator(".message.user .attachments img")
            assert shown.get_attribute("alt") == "Picture ball.png"
            assert shown.evaluate("image => image.naturalWidth") == 200
            assert "1" in text_of(ask(page, "How many are there?")), "it is still seen"
            (tmp_path / "text.png").write_text("no picture")
            page.set_input_files("#files", tmp_path / "text.png")
            page.locator("#attachments img").wait_for()
            refused = ask(page, "And this?").locator(".problem").text_content()
            assert "no image in a known format" in refused
            assert ask(page, "What is it?").locator(".problem").count() == 0, "what was refused is not sent again"
    finally:
        host.close()


def test_the_end_of_the_conversation_is_seen_on_a_narrow_screen(browser: Any, server: Service):
    with visit(browser, server, viewport={"width": 390, "height": 780}) as page:
        assert not page.is_visible("#options")
        for _ in range(3):
            answer = ask(page, "Hello!")
        until(page, "document.querySelector('.message.assistant:last-child .markdown')")
        end = answer.bounding_box()
        assert 0 < end["y"] + end["height"] <= page.locator("#ask").bounding_box()["y"] + 1
        page.click("#show-options")
        assert page.is_visible("#options")
        assert page.evaluate("document.activeElement.name") == "model"
        page.keyboard.press("Escape")
        assert not page.is_visible("#options")
        page.click("#show-sidebar")
        page.locator("#conversations .title").click()
        until(page, "document.querySelector('#sidebar').hidden")


def test_presets_keep_options(page: Any, server: Service):
    page.select_option("#preset", "Precise")
    assert page.input_value("[name=temperature]") == "0"
    fill(page, system="Answer in one word.", top_k="7")
    page.fill("#preset-name", "Short")
    page.click("#save-preset")
    page.select_option("#preset", "")
    assert page.input_value("[name=system]") == ""
    load(page, server.url)
    page.select_option("#preset", "Short")
    assert page.input_value("[name=system]") == "Answer in one word."
    assert page.input_value("[name=top_k]") == "7"
    page.click("#remove-preset")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    until(page, "document.querySelectorAll('#preset option').length === 4")
    load(page, server.url)
    assert page.input_value("[name=top_k]") == "7", "options survive a reload"
