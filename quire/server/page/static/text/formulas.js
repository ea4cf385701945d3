// LaTeX formulas. Until one is drawn, and if it has an error, its source is shown.

import { katex } from "../vendor.js";

const MOST = 300; // drawn formulas that are kept
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 500, maxSize: 20, output: "htmlAndMathml" };
const drawn = new Map(); // from the source to the drawn formula, the latest last
let library = null;

/** Draws the formulas below an element: those that were drawn before immediately, others as soon as possible. */
export function drawFormulas(place) {
  const formulas = [...place.querySelectorAll("code.math-inline, code.math-display")];
  const missing = formulas.filter((formula) => !replace(formula));
  if (missing.length) load().then(() => { for (const formula of missing) if (formula.isConnected) draw(formula); });
}

async function load() { library ??= await katex(); }

function sourceOf(formula) { return `${formula.className} ${formula.textContent}`; }

function replace(formula) {
  const source = sourceOf(formula), known = drawn.get(source);
  if (known === undefined) return false;
  drawn.delete(source);
  drawn.set(source, known);
  if (known) formula.replaceWith(known.cloneNode(true));
  else formula.classList.add("wrong");
  return true;
}

function draw(formula) {
  const displayMode = formula.classList.contains("math-display");
  const made = document.createElement("span");
  made.className = displayMode ? "formula display" : "formula";
  let result = made;
  try {
    withoutStyleAttributes(() => library.render(formula.textContent, made, { ...OPTIONS, displayMode }));
  } catch (error) {
    if (error.name !== "ParseError") throw error;
    result = null;
  }
  drawn.set(sourceOf(formula), result);
  if (drawn.size > MOST) drawn.delete(drawn.keys().next().value);
  replace(formula);
}

// KaTeX sets some styles of SVG elements as attributes, which the Content-Security-Policy forbids, unlike properties.
function withoutStyleAttributes(work) {
  const { setAttribute } = Element.prototype;
  Element.prototype.setAttribute = function set(name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };
  try {
    work();
  } finally {
    Element.prototype.setAttribute = setAttribute;
  }
}
