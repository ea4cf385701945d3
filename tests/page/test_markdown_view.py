"""Markdown of answers in a real browser: what it looks like, that it can do no harm, and what it costs."""

from __future__ import annotations

import json
from typing import Any

from support.pages import MARKS, ask, until
from support.server import Service

pytestmark = MARKS
TEXT = r"""# Title

Some *text*, `code`, [a link](https://example.org/x) and ![a picture](https://example.org/a.png).

| name | value |
|------|------:|
| one  | $x^2$ |

- [x] done
  1. nested

```python
def f(x: int) -> str:
    return "<b>"  # comment
```

It costs $5 or $6, and $\vec{v}$ is no price:

$$\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}$$

\(\frac{1\)

> A quote
"""
HARM = """<script>window.harm = 1</script><img src=x onerror="window.harm = 2">
<style>body { display: none }</style><iframe src="https://example.org"></iframe>

<a href="javascript:window.harm=3" id="prompt" style="color: red">one</a> [two](javascript:window.harm=4)
[three](data:text/html,x) [four](/v1/models) <b onclick="window.harm=5">five</b> <b>six</b><br>seven

<form action="https://example.org"><input name=x></form>

$\\href{javascript:window.harm=6}{x}$ $\\includegraphics{https://example.org/b.png}$ `<img src=y>`
"""
VIEW = """async ([text, size]) => {
    const { MarkdownView } = await import("/ui/text/markdown.js");
    const view = new MarkdownView();
    document.querySelector("#messages").replaceChildren(view.element);
    const kept = [], times = [];
    for (let end = size; end < text.length; end += size) {
        const began = performance.now();
        view.text = text.slice(0, end);
        await view.render();
        times.push(performance.now() - began);
        kept.push(view.element.children[0]);
    }
    view.set(text, true);
    await new Promise(done => setTimeout(done, 100));
    window.view = view;
    return { isStable: kept.every(one => one === kept.at(-1)), times };
}"""


def show(page: Any, text: str, size: int = 10**9) -> Any:
    """Shows a text that arrives in pieces of a size. Returns what the pieces cost."""
    found = page.evaluate(VIEW, [text, size])
    until(page, "window.view.settled === window.view.text.length")
    return found


def test_each_kind_of_block_is_shown(page: Any):
    show(page, TEXT)
    until(page, "document.querySelectorAll('.markdown .formula').length === 3")
    view = page.locator(".markdown")
    assert view.locator("h3").text_content() == "Title"
    assert view.locator("td").all_text_contents()[0] == "one"
    assert view.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert "☑ done" in view.locator("li").first.text_content()
    link = view.get_by_role("link", name="a link")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert view.get_by_role("link", name="a picture").get_attribute("href") == "https://example.org/a.png"
    assert view.locator("img").count() == 0
    until(page, "document.querySelector('.code .hljs-keyword')")
    assert view.locator(".code code").text_content() == 'def f(x: int) -> str:\n    return "<b>"  # comment'
    assert "It costs $5 or $6, and" in view.text_content()
    assert view.locator("code.wrong").text_content() == r"\frac{1", "the source of a wrong formula is shown"
    assert view.locator(".formula.display math").count() == 1, "screen readers get MathML"
    assert page.evaluate("document.fonts.check('16px KaTeX_Main')")


def test_code_is_copied(page: Any):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(page, TEXT)
    page.locator(".code").get_by_role("button", name="Copy").click()
    page.locator(".code").get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def f(x: int)")


def test_a_text_can_do_no_harm(page: Any):
    show(page, HARM)
    page.wait_for_timeout(200)
    assert page.evaluate("window.harm") is None
    view = page.locator(".markdown")
    assert view.locator("script, style, img, iframe, form, input, [id], [onclick]").count() == 0
    assert view.locator("a[href]").count() == 0
    assert view.locator("b").text_content() == "six"
    assert '<b onclick="window.harm=5">' in view.text_content(), "other HTML is shown as text"


def test_blocks_that_are_complete_are_not_touched_again(page: Any):
    assert show(page, TEXT * 3, size=7)["isStable"]
    pieces = page.locator(".markdown").inner_text()
    show(page, TEXT * 3)
    assert page.locator(".markdown").inner_text() == pieces, "the same text as in one piece"


def test_long_answers_cost_no_more_for_each_piece(page: Any):
    times = show(page, (TEXT + "\n") * 150, size=400)["times"]
    first, last = sorted(times[5:55]), sorted(times[-50:])
    assert last[25] < 3 * first[25] + 5, "milliseconds"


def test_a_model_writes_markdown(page: Any, server: Service):
    more = {"structured_outputs": {"choice": ["## Hi\n\n| a | b |\n|---|---|\n| **1** | $y$ |\n"]}}
    answer = ask(page, "Hello", more=json.dumps(more))
    until(page, "document.querySelector('.message .markdown .formula')")
    assert answer.locator("td strong").text_content() == "1"
