// The conversations and the options: columns beside the chat, or drawers over it in narrow windows.

import { byId } from "./dom.js";

const narrow = matchMedia("(max-width: 60rem)");
const KEY = "quire-closed"; // the columns that the user has closed
const PAIRS = [["sidebar", "show-sidebar"], ["options", "show-options"]];

function closed() { return (localStorage.getItem(KEY) ?? "").split(" ").filter(Boolean); }

function set(name, isOpen) {
  byId(name).hidden = !isOpen;
  byId(PAIRS.find(([drawer]) => drawer === name)[1]).setAttribute("aria-expanded", isOpen);
  byId("backdrop").hidden = !(narrow.matches && PAIRS.some(([drawer]) => !byId(drawer).hidden));
}

function arrange() { for (const [name] of PAIRS) set(name, !narrow.matches && !closed().includes(name)); }

function toggle(name) {
  const isOpen = byId(name).hidden;
  if (narrow.matches) {
    for (const [other] of PAIRS) set(other, other === name && isOpen);
    if (isOpen) byId(name).querySelector("button, input, select").focus();
    return;
  }
  localStorage.setItem(KEY, [...closed().filter((each) => each !== name), ...(isOpen ? [] : [name])].join(" "));
  set(name, isOpen);
}

/** Closes what covers the chat. Returns whether something did. */
export function close() {
  const covering = narrow.matches ? PAIRS.filter(([name]) => !byId(name).hidden) : [];
  for (const [name, button] of covering) {
    set(name, false);
    byId(button).focus();
  }
  return covering.length > 0;
}

export function listen() {
  for (const [name, button] of PAIRS) byId(button).addEventListener("click", () => toggle(name));
  byId("backdrop").addEventListener("click", close);
  byId("new").addEventListener("click", () => { if (close()) byId("prompt").focus(); });
  byId("conversations").addEventListener("click", (event) => { if (event.target.closest(".title")) close(); });
  narrow.addEventListener("change", arrange);
  arrange();
}
