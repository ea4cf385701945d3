// Hints: a sentence about what is meant, for the pointer and for the keyboard.

import { byId } from "./dom.js";

const tip = byId("tip");

export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${y + height + 20 > innerHeight ? y - height - 12 : y + 16}px`;
}

export function hideTip() { tip.hidden = true; }

/** Shows the hints of all elements with the class "hint". */
export function listen() {
  const hintOf = (event) => event.target.closest?.(".hint");
  document.addEventListener("pointerover", (event) => {
    const hint = hintOf(event);
    if (hint) showTip(hint.dataset.hint, event.clientX, event.clientY);
  });
  document.addEventListener("pointerout", (event) => { if (hintOf(event)) hideTip(); });
  document.addEventListener("focusin", (event) => {
    const hint = hintOf(event);
    if (!hint || !hint.matches(":focus-visible")) return;
    const { left, bottom } = hint.getBoundingClientRect();
    showTip(hint.dataset.hint, left, bottom);
  });
  document.addEventListener("focusout", (event) => { if (hintOf(event)) hideTip(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
}
