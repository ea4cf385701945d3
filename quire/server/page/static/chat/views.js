// How messages look.

import { copyButton } from "../copying.js";
import { button, element, iconButton, problem } from "../dom.js";
import { duration, number, t } from "../i18n.js";
import { MarkdownView } from "../text/markdown.js";
import * as attachments from "./attachments.js";
import { Calls } from "./calls.js";
import { HeatMap } from "./heat.js";

/**
 * What the buttons of messages do.
 * @typedef {object} Actions
 * @property {(message: object, text: string) => void} edit
 * @property {(message: object) => void} regenerate
 * @property {(message: object) => void} proceed continues an answer
 * @property {(message: object) => void} choose
 * @property {(message: object, results: object[]) => void} sendResults
 * @property {(message: object) => object[]} alternatives
 * @property {(message: object) => HTMLElement | null} explain a button that shows what the engine did for an answer
 */

class MessageView {
  constructor(message, actions, label) {
    this.message = message;
    this.actions = actions;
    this.element = element("article", `message ${message.role}`);
    this.element.setAttribute("aria-label", label);
    this.element.append(element("h2", "hidden", label));
    this.foot = element("div", "foot");
  }

  // The buttons that go to the other messages that could be here.
  branches() {
    const all = this.actions.alternatives(this.message), at = all.indexOf(this.message);
    if (all.length < 2) return [];
    const place = element("span", "branches"), go = (step) => () => this.actions.choose(all[at + step]);
    const before = iconButton("‹", t("Previous version"), go(-1)), after = iconButton("›", t("Next version"), go(1));
    before.disabled = at === 0;
    after.disabled = at === all.length - 1;
    place.append(before, element("span", "", `${at + 1}/${all.length}`), after);
    return [place];
  }
}

export class UserView extends MessageView {
  constructor(message, actions) {
    super(message, actions, t("You"));
    const files = element("div", "attachments");
    files.append(...(message.attachments ?? []).map(attachments.shown));
    if (files.hasChildNodes()) this.element.append(files);
    this.place = element("div", "text", message.text);
    this.element.append(this.place, this.foot);
    this.refresh();
  }

  refresh() {
    this.foot.replaceChildren(...this.branches(), copyButton(() => this.message.text), button(t("Edit"), () => this.edit(), "small edit"));
  }

  edit() {
    const form = element("form", "editor"), field = element("textarea"), row = element("div", "row");
    field.value = this.message.text;
    field.rows = Math.min(12, field.value.split("\n").length + 1);
    field.setAttribute("aria-label", t("Message"));
    const end = () => { form.replaceWith(this.place); this.foot.hidden = false; };
    const submit = element("button", "primary", t("Send"));
    row.append(submit, button(t("Cancel"), end));
    form.append(field, row);
    form.addEventListener("submit", (event) => { event.preventDefault(); end(); this.actions.edit(this.message, field.value); });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    this.place.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

export class AnswerView extends MessageView {
  constructor(message, actions) {
    super(message, actions, t("Answer"));
    this.head = element("p", "model", message.model);
    this.thoughts = null;
    this.link = null;
    this.body = element("div", "body");
    this.markdown = null;
    this.heat = null;
    this.calls = new Calls((results) => actions.sendResults(message, results));
    this.element.append(this.head, this.body, this.calls.element, this.foot);
  }

  /** Shows what the answer contains so far. tokens: with likelihoods, or none. */
  update(tokens = []) {
    const { message } = this;
    if (message.thinking) this.showThoughts(false);
    if (tokens.length) {
      if (!this.heat) { this.heat = new HeatMap(); this.body.append(this.heat.element); }
      this.heat.set(tokens);
    } else if (message.text) this.showText(false);
    this.calls.set(message.calls ?? []);
  }

  /** Shows the complete answer. results: of its calls, if there are. isLast: whether it ends the conversation. */
  finish({ tokens = [], results = null, isLast = true, isChosen = true } = {}) {
    const { message } = this;
    if (message.thinking) this.showThoughts(true);
    if (this.heat && !tokens.length && !this.heat.isFinished) { this.heat.element.remove(); this.heat = null; }
    if (tokens.length) {
      this.heat.set(tokens);
      this.heat.finish();
      this.heat.isFinished = true;
    } else if (!this.heat) this.showText(true);
    this.calls.finish(message.calls ?? [], results);
    this.element.querySelector(":scope > .problem")?.remove();
    if (message.problem) this.foot.before(problem(message.problem));
    this.refresh(isLast, isChosen);
  }

  refresh(isLast, isChosen) {
    const { message, actions } = this, buttons = this.branches();
    if (message.text) buttons.push(copyButton(() => message.text));
    buttons.push(button(t("Try again"), () => actions.regenerate(message), "small"));
    const canProceed = isLast && message.text && !message.calls?.length && ["stopped", "length"].includes(message.reason);
    if (canProceed) buttons.push(button(t("Continue"), () => actions.proceed(message), "small"));
    if (this.heat) buttons.push(button(t("Formatted text"), () => this.dropHeat(isLast, isChosen), "small"));
    if (!isChosen) buttons.push(button(t("Go on with this answer"), () => actions.choose(message), "small"));
    this.link = actions.explain(message);
    if (this.link) buttons.push(this.link);
    const facts = element("p", "facts", factsOf(message).join(" · "));
    this.foot.replaceChildren(...(facts.textContent ? [facts] : []), ...buttons);
    this.element.classList.toggle("other", !isChosen);
  }

  dropHeat(isLast, isChosen) {
    this.heat.element.remove();
    this.heat = null;
    this.showText(true);
    this.refresh(isLast, isChosen);
  }

  showText(isFinal) {
    if (!this.markdown || (this.markdown.isFinal && this.markdown.text !== this.message.text)) {
      this.markdown?.element.remove();
      this.markdown = new MarkdownView();
      this.body.append(this.markdown.element);
    }
    if (!this.markdown.isFinal) this.markdown.set(this.message.text, isFinal);
  }

  showThoughts(isComplete) {
    const { message } = this;
    if (!this.thoughts) {
      const details = element("details", "thoughts");
      this.thoughts = { summary: element("summary"), text: element("div", "text"), details };
      details.append(this.thoughts.summary, this.thoughts.text);
      this.body.before(details);
    }
    const isDone = isComplete || message.text || message.calls?.length;
    this.thoughts.summary.textContent = isDone ? t("Thought for {time}", { time: duration(message.thinkingMs ?? 0) }) : t("Thinking…");
    this.thoughts.text.append(message.thinking.slice(this.thoughts.text.textContent.length));
  }
}

/** The figures of an answer, as texts. */
function factsOf({ figures = {}, reason, route }) {
  const facts = [];
  if (figures.first !== undefined) facts.push(t("first token after {time}", { time: duration(Math.round(figures.first)) }));
  if (figures.rate) facts.push(t("{rate} tokens/s", { rate: number(figures.rate, 1) }));
  if (figures.prompt !== undefined) {
    const values = { prompt: number(figures.prompt), cached: number(figures.cached), output: number(figures.output) };
    facts.push(figures.cached ? t("{prompt} prompt tokens ({cached} cached)", values) : t("{prompt} prompt tokens", values));
    facts.push(t("{output} output tokens", values));
  }
  if (figures.joules) facts.push(`${number(figures.joules, 1)} J`);
  if (route) facts.push(t("route: {route}", { route }));
  const reasons = {
    length: t("cut off by the limit of tokens"), stopped: t("stopped"), tool_calls: t("calls tools"),
    repetition: t("ended because it repeated itself"),
  };
  if (reasons[reason]) facts.push(reasons[reason]);
  return facts;
}
