// Shows Markdown that grows. Blocks that cannot change any more are not touched again, so that nothing flickers, and the
// cost of each new piece does not depend on the length of the text.

import { element } from "../dom.js";
import { CodeBlock } from "./code.js";
import { drawFormulas } from "./formulas.js";
import { blocksOf, fragmentOf, loadParser } from "./parser.js";

const MOST = 100_000; // characters of a block that is shown as Markdown
const SHARE = 4; // the time between two renderings is at least this multiple of what one takes

export class MarkdownView {
  constructor() {
    this.element = element("div", "markdown");
    this.text = "";
    this.settled = 0; // characters in blocks that do not change any more
    this.headings = []; // the depths of those above the next block
    this.last = null; // the block that may: { place, code }
    this.isFinal = false;
    this.timer = null;
    this.wait = 0;
  }

  /** Shows a text, which adds to the one before. isFinal: nothing will be added. */
  set(text, isFinal = false) {
    this.text = text;
    this.isFinal = isFinal;
    this.timer ??= setTimeout(() => this.render(), isFinal ? 0 : this.wait);
    return this;
  }

  async render() {
    await loadParser();
    this.timer = null;
    const began = performance.now();
    this.update();
    this.wait = Math.max(30, SHARE * (performance.now() - began));
  }

  update() {
    const rest = this.text.slice(this.settled);
    if (rest.length > MOST && !this.isFinal) { this.show([{ type: "text", raw: rest }], false); return; }
    const blocks = blocksOf(rest);
    // A blank line ends most blocks, but not lists or code. The next block that has content does.
    const full = blocks.map((block, i) => (block.type === "space" ? -1 : i)).filter((i) => i >= 0);
    const changing = this.isFinal ? blocks.length : full.at(-1) ?? 0;
    for (const block of blocks.slice(0, changing)) {
      this.show([block], true);
      this.settled += block.raw.length;
    }
    if (changing < blocks.length) this.show(blocks.slice(changing), false);
    if (this.isFinal && this.last) { this.last.place.remove(); this.last = null; }
    if (this.isFinal) this.element.dataset.whole = "";
  }

  // Shows a block in the last place. isSettled: the next block gets a place of its own.
  show(blocks, isSettled) {
    const [block] = blocks;
    if (block.type === "space" || block.type === "def") return;
    if (!this.last) {
      this.last = { place: element("div", "block"), code: null };
      this.element.append(this.last.place);
    }
    const { last } = this;
    if (block.type === "code") this.showCode(block, isSettled);
    else if (block.raw.length > MOST) last.place.replaceChildren(element("div", "text", block.raw));
    else {
      last.code = null;
      const headings = [...this.headings];
      last.place.replaceChildren(fragmentOf(blocks, headings));
      if (isSettled) this.headings = headings;
      for (const table of last.place.querySelectorAll("table")) wrap(table);
      for (const code of last.place.querySelectorAll("pre > code")) replaceCode(code, isSettled);
      drawFormulas(last.place);
    }
    if (isSettled) this.last = null;
  }

  showCode(block, isSettled) {
    const { last } = this, name = (block.lang ?? "").trim().split(/\s/)[0];
    if (last.code?.name !== name) {
      last.code = new CodeBlock(name);
      last.place.replaceChildren(last.code.element);
    }
    last.code.set(block.text);
    if (isSettled) last.code.finish();
  }
}

/** @returns {HTMLElement} a text that is complete */
export function markdownOf(text) { return new MarkdownView().set(text, true).element; }

// Wide tables scroll, and not the page.
function wrap(table) {
  const scroll = element("div", "scroll");
  scroll.tabIndex = 0;
  table.replaceWith(scroll);
  scroll.append(table);
}

// Code within lists and quotes.
function replaceCode(code, isSettled) {
  const name = [...code.classList].find((each) => each.startsWith("language-"))?.slice(9) ?? "";
  const made = new CodeBlock(name);
  made.set(code.textContent.replace(/\n$/, ""));
  if (isSettled) made.finish();
  code.parentElement.replaceWith(made.element);
}
