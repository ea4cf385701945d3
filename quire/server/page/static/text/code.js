// Blocks of code: highlighted, with the name of the language and a button that copies them.

import { element } from "../dom.js";
import { copyButton } from "../copying.js";
import { highlight, language } from "../vendor.js";

const MOST = 50_000; // characters that are highlighted
const FILES = new Set(("bash c cpp csharp css diff dockerfile go ini java javascript json kotlin latex lua makefile markdown php "
  + "python r ruby rust sql swift typescript xml yaml").split(" "));
const ALIASES = {
  sh: "bash", shell: "bash", zsh: "bash", console: "bash", "c++": "cpp", cc: "cpp", h: "c", cs: "csharp", "c#": "csharp",
  docker: "dockerfile", golang: "go", toml: "ini", js: "javascript", jsx: "javascript", mjs: "javascript", jsonc: "json",
  kt: "kotlin", tex: "latex", make: "makefile", md: "markdown", py: "python", python3: "python", rb: "ruby", rs: "rust",
  ts: "typescript", tsx: "typescript", html: "xml", svg: "xml", yml: "yaml", patch: "diff",
};

export class CodeBlock {
  /** @param {string} name the language that the block names, or "" */
  constructor(name) {
    this.name = name;
    this.text = "";
    this.element = element("div", "code");
    const head = element("div", "code-head");
    head.append(element("span", "", name), copyButton(() => this.text));
    this.code = element("code");
    const scroll = element("pre");
    scroll.tabIndex = 0;
    scroll.append(this.code);
    this.element.append(head, scroll);
  }

  /** Shows a text, which usually only adds to the one before. */
  set(text) {
    if (text.startsWith(this.text)) this.code.append(text.slice(this.text.length));
    else this.code.textContent = text;
    this.text = text;
  }

  /** Highlights the text, which does not change any more. */
  async finish() {
    const name = this.name.toLowerCase(), file = ALIASES[name] ?? name, { text } = this;
    if (!FILES.has(file) || text.length > MOST) return;
    await language(file);
    if (text !== this.text) return;
    this.code.innerHTML = (await highlight()).highlight(text, { language: file, ignoreIllegals: true }).value;
  }
}
