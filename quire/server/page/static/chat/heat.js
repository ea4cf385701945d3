// Shows how likely each token of an answer was, and what else the model considered.

import { element } from "../dom.js";
import { t } from "../i18n.js";

const BOUNDS = [0.1, 0.3, 0.6, 0.9]; // of a token's probability, between the five colors

export class HeatMap {
  constructor() {
    this.tokens = [];
    this.opened = null;
    this.element = element("div", "heat");
    this.place = element("div", "text");
    this.element.append(this.place);
    this.place.addEventListener("keydown", (event) => this.move(event));
  }

  /** @param {object[]} tokens of which the first are shown already */
  set(tokens) {
    while (this.tokens.length > tokens.length) this.tokens.pop().element.remove();
    for (const token of tokens.slice(this.tokens.length)) this.add(token);
  }

  finish() {
    this.place.tabIndex = 0;
    this.place.setAttribute("role", "group");
    this.place.setAttribute("aria-label", t("Tokens of the answer; the arrow keys show what else was considered"));
  }

  add(token) {
    const place = element("span", "", token.token), likely = Math.exp(token.logprob);
    place.className = `token p${BOUNDS.filter((bound) => likely >= bound).length}`;
    const index = this.tokens.push({ ...token, element: place }) - 1;
    place.addEventListener("click", () => this.open(index));
    this.place.append(place);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.open(Math.max(0, Math.min(this.tokens.length - 1, (this.opened ?? -step) + step)));
  }

  open(index) {
    const token = this.tokens[index];
    if (!token) return;
    this.tokens[this.opened]?.element.removeAttribute("aria-current");
    this.opened = index;
    token.element.setAttribute("aria-current", "true");
    const table = element("table", "choices"), head = table.createTHead().insertRow(), body = table.createTBody();
    table.createCaption().textContent = t("Token {index} of {count}, and what else the model considered", { index: index + 1, count: this.tokens.length });
    for (const title of [t("Token"), t("Probability")]) head.append(Object.assign(element("th", "", title), { scope: "col" }));
    const rows = token.top.some((other) => other.token === token.token) ? token.top : [...token.top, token];
    for (const other of rows) {
      const row = body.insertRow();
      row.className = other.token === token.token ? "chosen" : "";
      row.insertCell().append(element("code", "", other.token.replaceAll("\n", "⏎") || "∅"));
      row.insertCell().textContent = percent(Math.exp(other.logprob));
    }
    this.element.querySelector(".choices")?.remove();
    this.place.after(table);
  }
}

function percent(share) { return share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`; }
