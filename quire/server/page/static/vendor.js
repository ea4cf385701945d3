// Loads the libraries in vendor/ when they are needed first. vendor/README.md lists them.

const HIGHLIGHT = "./vendor/highlight-11.12.0";
const KATEX = "./vendor/katex-0.19.1";
const loading = new Map();

function once(name, load) {
  if (!loading.has(name)) loading.set(name, load());
  return loading.get(name);
}

/** @returns {Promise<{Marked: Function, purify: object}>} the parser and the sanitizer */
export function markdown() {
  return once("markdown", async () => {
    const [{ Marked }] = await Promise.all([
      import("./vendor/marked-18.2.1/marked.esm.js"), import("./vendor/dompurify-3.5.0/purify.min.js"),
    ]);
    return { Marked, purify: globalThis.DOMPurify };
  });
}

/** @returns {Promise<object>} KaTeX, after its style sheet */
export function katex() {
  return once("katex", async () => {
    const href = new URL(`${KATEX}/katex.min.css`, import.meta.url).href;
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href });
    const styled = new Promise((resolve, reject) => { style.onload = resolve; style.onerror = reject; });
    document.head.append(style);
    await Promise.all([styled, import(`${KATEX}/katex.min.js`)]);
    return globalThis.katex;
  });
}

/** @returns {Promise<object>} highlight.js without any language */
export function highlight() {
  return once("highlight", async () => (await import(`${HIGHLIGHT}/core.min.js`)).default);
}

/** Adds a language, by the name of its file. */
export function language(name) {
  return once(`language ${name}`, async () => {
    const [library, grammar] = await Promise.all([highlight(), import(`${HIGHLIGHT}/languages/${name}.min.js`)]);
    library.registerLanguage(name, grammar.default);
  });
}
