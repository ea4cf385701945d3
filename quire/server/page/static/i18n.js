// The page's language: that of the browser, unless the user chooses another. English texts are the keys of the table.

import { STRINGS } from "./strings.js";

const KEY = "quire-language";
export const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", fr: "Français", ja: "日本語", zh: "中文" };
const CODES = Object.keys(LANGUAGES);

export const language = [localStorage.getItem(KEY), ...navigator.languages.map((each) => each.slice(0, 2)), "en"]
  .find((each) => CODES.includes(each));
const column = CODES.indexOf(language) - 1;

/** A text in the page's language. values: replace {names} in it. */
export function t(text, values = {}) {
  const found = column < 0 ? text : STRINGS[text]?.[column] ?? text;
  return found.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** @param {number} value */
export function number(value, digits = 0) {
  return value.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** @param {number} ms */
export function duration(ms) {
  if (ms < 1000) return `${number(ms)} ms`;
  return ms < 60_000 ? `${number(ms / 1000, ms < 10_000 ? 2 : 1)} s` : `${Math.floor(ms / 60_000)} min ${Math.round(ms / 1000) % 60} s`;
}

/** Translates the texts of the document's elements, and of their attributes that data-t-ATTRIBUTE names. */
export function translate(root = document) {
  document.documentElement.lang = language;
  for (const place of root.querySelectorAll("[data-t]")) place.textContent = t(place.dataset.t || place.textContent.trim());
  for (const hint of root.querySelectorAll("[data-t-data-hint]")) hint.setAttribute("aria-label", t(hint.dataset.hint));
  for (const name of ["placeholder", "aria-label", "title", "data-hint"]) {
    for (const place of root.querySelectorAll(`[data-t-${name}]`)) place.setAttribute(name, t(place.getAttribute(name)));
  }
}

/** Shows the page in another language. */
export function choose(code) {
  localStorage.setItem(KEY, code);
  location.reload();
}
