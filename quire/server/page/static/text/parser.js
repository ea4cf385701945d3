// Turns Markdown of models, which is not trusted, into elements that can do no harm: no scripts, styles, ids, pictures or
// links that load by themselves. HTML is shown as text, except for some tags without attributes.

import { markdown } from "../vendor.js";

const PLAIN = "b|br|del|dd|details|dl|dt|em|hr|i|ins|kbd|mark|p|s|strong|sub|summary|sup|u";
const TAG = new RegExp(`<(?!/?(?:${PLAIN})\\s*/?>)`, "gi");
const ALLOWED = {
  ALLOWED_TAGS: [...PLAIN.split("|"), "a", "blockquote", "code", "h3", "h4", "h5", "h6", "li", "ol", "pre", "table",
    "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "title", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"], ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
};
const CLASS = /^(?:math-inline|math-display|language-[\w+#.-]+)$/;

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (found) => escapes[found]);

const block = {
  name: "block formula", level: "block",
  start: (text) => text.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(text) {
    const found = /^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/.exec(text);
    return found ? { type: "block formula", raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
  },
  renderer: (token) => `<p><code class="math-display">${escape(token.text)}</code></p>`,
};

// A dollar sign begins a formula if no space follows, and ends it if no space precedes and no digit follows.
const inline = {
  name: "formula", level: "inline",
  start: (text) => text.match(/\$|\\[([]/)?.index,
  tokenizer(text) {
    const found = /^\$\$([^$]+?)\$\$|^\\\[([^]+?)\\\]|^\\\(([^]+?)\\\)|^\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)/.exec(text);
    if (!found) return undefined;
    const [raw, dollars, brackets, parentheses, dollar] = found;
    const isDisplay = dollars !== undefined || brackets !== undefined;
    return { type: "formula", raw, isDisplay, text: (dollars ?? brackets ?? parentheses ?? dollar).trim() };
  },
  renderer: (token) => `<code class="math-${token.isDisplay ? "display" : "inline"}">${escape(token.text)}</code>`,
};

const renderer = {
  html: ({ text }) => text.replace(TAG, "&lt;"),
  image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  heading({ tokens, depth }) {
    while (above.at(-1) >= depth) above.pop();
    above.push(depth);
    const level = Math.min(6, 2 + above.length); // the first two belong to the page, and none is skipped
    return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
  },
};

let above = []; // the depths of the headings above the current place, which grow
let parser = null;
let purify = null;

export async function loadParser() {
  if (parser) return;
  const found = await markdown();
  purify = found.purify;
  purify.addHook("uponSanitizeAttribute", (_, data) => {
    if (data.attrName === "class" && !CLASS.test(data.attrValue)) data.keepAttr = false;
  });
  purify.addHook("afterSanitizeAttributes", (node) => {
    if (node.tagName !== "A" || !node.hasAttribute("href")) return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  });
  parser = new found.Marked({ gfm: true, breaks: false, renderer, extensions: [block, inline] });
}

/** The blocks of a text: paragraphs, lists, code. Their `raw` texts together are the text. loadParser() must have ended. */
export function blocksOf(text) { return parser.lexer(text); }

/** @param {number[]} headings above the blocks; changed to those above what follows @returns {DocumentFragment} */
export function fragmentOf(tokens, headings) {
  above = headings;
  return purify.sanitize(parser.parser(tokens), ALLOWED);
}
