// The frame of the page: tabs, light and dark, the API key, and hints.

import { askForKey, call, setKey } from "./api.js";
import * as engine from "./engine.js";
import * as learn from "./learn.js";
import * as playground from "./playground.js";

const byId = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  engine.watch(tab.id === "tab-engine" && !document.hidden);
  learn.show(tab.id === "tab-learn");
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}
// Nothing is recorded for a page that nobody sees.
document.addEventListener("visibilitychange", () => engine.watch(!byId("engine").hidden && !document.hidden));

// ---- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("quire-theme");

function paint() {
  const isDark = theme ? theme === "dark" : dark.matches;
  document.documentElement.classList.toggle("dark", isDark);
  byId("theme").textContent = isDark ? "☾" : "☀";
  engine.repaint();
}

byId("theme").addEventListener("click", () => {
  theme = document.documentElement.classList.contains("dark") ? "light" : "dark";
  localStorage.setItem("quire-theme", theme);
  paint();
});
dark.addEventListener("change", paint);

// ---- hints: a sentence about what is meant, for the pointer and for the keyboard

const tip = byId("tip");

export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${y + height + 20 > innerHeight ? y - height - 12 : y + 16}px`;
}

export function hideTip() { tip.hidden = true; }

function hintOf(event) { return event.target.closest?.(".hint"); }
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

// ---- the start

async function start() {
  try {
    const about = await (await call("ui/about")).json();
    byId("key-form").hidden = true;
    byId("status").textContent = `${about.models[0]} · ${about.max_model_len.toLocaleString("en")} tokens of context · version ${about.version}`;
    playground.start(about);
    engine.start(about, { showTip, hideTip });
    show(tabs.find((tab) => location.hash === `#${tab.getAttribute("aria-controls")}`) ?? tabs[0]);
  } catch (error) {
    if (byId("key-form").hidden) byId("status").textContent = error.message;
  }
}

askForKey(() => { byId("key-form").hidden = false; byId("key").focus(); });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  start();
});
paint();
start();
