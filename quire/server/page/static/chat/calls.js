// The tool calls of an answer as cards, with a place for each result.

import { button, element } from "../dom.js";
import { t } from "../i18n.js";
import { CodeBlock } from "../text/code.js";

export class Calls {
  /** @param {(results: { id: string, text: string }[]) => void} send */
  constructor(send) {
    this.send = send;
    this.cards = [];
    this.element = element("div", "calls");
  }

  /** Shows calls whose arguments may be incomplete. */
  set(calls) {
    calls.forEach((call, i) => {
      this.cards[i] ??= this.add(call);
      this.cards[i].title.textContent = call.name;
      this.cards[i].code.set(call.arguments);
    });
  }

  add(call) {
    const card = element("section", "call"), head = element("p", "call-head"), title = element("strong");
    head.append("⚙ ", title);
    card.setAttribute("aria-label", t("Tool call"));
    const code = new CodeBlock("json");
    card.append(head, code.element);
    this.element.append(card);
    return { card, title, code, call, result: null };
  }

  /** Shows the complete calls. results: those that were given, or null if they can be given now. */
  finish(calls, results) {
    if (this.cards.length && this.results === results) return;
    this.results = results;
    this.set(calls);
    this.last?.remove();
    for (const { code, call } of this.cards) {
      code.set(indented(call.arguments));
      code.finish();
    }
    for (const card of this.cards) {
      card.place?.remove();
      card.place = results ? shownResult(results.find(({ id }) => id === card.call.id)) : this.resultField(card);
      card.card.append(card.place);
    }
    if (results || !this.cards.length) return;
    this.last = element("div", "row");
    this.last.append(button(t("Send results"), () => this.submit(), "primary"));
    this.element.append(this.last);
  }

  resultField(card) {
    const label = element("label", "result", t("Result"));
    card.field = element("textarea");
    card.field.rows = 2;
    card.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit();
    });
    label.append(card.field);
    return label;
  }

  submit() { this.send(this.cards.map(({ call, field }) => ({ id: call.id, text: field.value }))); }
}

function shownResult(result) {
  const made = element("div", "result", t("Result"));
  made.append(element("pre", "text", result?.text ?? ""));
  return made;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
