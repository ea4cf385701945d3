// Buttons that copy a text.

import { button as makeButton } from "./dom.js";
import { t } from "./i18n.js";

const SHOWN = 1500; // milliseconds for which the button shows that it has copied

/** Copies a text, and shows it on the button. @param {() => string} make */
export async function copy(button, make) {
  const label = button.dataset.copies ??= button.textContent;
  try {
    await write(make());
    button.textContent = t("Copied");
  } catch {
    button.textContent = t("Not copied");
  }
  setTimeout(() => { button.textContent = label; }, SHOWN);
}

async function write(text) {
  if (navigator.clipboard) { await navigator.clipboard.writeText(text); return; }
  // Browsers have no clipboard for pages that come without TLS from other machines.
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("The browser refuses to copy.");
}

/** @param {() => string} make @returns {HTMLButtonElement} */
export function copyButton(make, label = t("Copy")) {
  const made = makeButton(label, () => copy(made, make), "small");
  return made;
}
