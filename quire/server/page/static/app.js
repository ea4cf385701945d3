// The frame of the page: tabs, language, light and dark, the API key, and the keyboard.

import { askForKey, call, setKey } from "./api.js";
import * as chat from "./chat/chat.js";
import { byId } from "./dom.js";
import * as drawers from "./drawers.js";
import * as engine from "./engine/engine.js";
import { choose, language, LANGUAGES, number, t, translate } from "./i18n.js";
import * as learn from "./learn.js";
import * as models from "./models/models.js";
import * as tips from "./tips.js";

const KEEP = "quire-keep-recording";
const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  const name = tab.getAttribute("aria-controls");
  history.replaceState(null, "", `#${name}`);
  for (const each of document.querySelectorAll(".chat-only")) each.hidden = name !== "chat";
  watch();
  models.show(name === "models");
  learn.show(name === "learn");
}

function listenToTabs() {
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
  document.addEventListener("visibilitychange", watch);
  byId("keep-recording").checked = localStorage.getItem(KEEP) === "yes";
  byId("keep-recording").addEventListener("change", () => localStorage.setItem(KEEP, byId("keep-recording").checked ? "yes" : "no"));
}

function watch() { engine.watch(!document.hidden && (!byId("engine").hidden || byId("keep-recording").checked)); }

// ---- language

function listLanguages() {
  byId("language").replaceChildren(...Object.entries(LANGUAGES).map(([code, name]) => new Option(name, code)));
  byId("language").value = language;
  byId("language").addEventListener("change", () => choose(byId("language").value));
}

// ---- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("quire-theme");

function paint() {
  const isDark = theme ? theme === "dark" : dark.matches;
  document.documentElement.classList.toggle("dark", isDark);
  byId("theme").textContent = isDark ? "☾" : "☀";
  engine.repaint();
}

function listenToTheme() {
  byId("theme").addEventListener("click", () => {
    theme = document.documentElement.classList.contains("dark") ? "light" : "dark";
    localStorage.setItem("quire-theme", theme);
    paint();
  });
  dark.addEventListener("change", paint);
}

// ---- the keyboard

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && !event.defaultPrevented) { if (!drawers.close()) chat.stop(); }
    if (event.altKey && event.code === "KeyN") act(event, chat.begin);
    if ((event.ctrlKey || event.metaKey) && event.code === "KeyK") act(event, () => byId("search").focus());
    const isTyping = event.target.closest("input, textarea, select");
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) act(event, () => byId("prompt").focus());
  });
}

function act(event, action) {
  event.preventDefault();
  show(byId("tab-chat"));
  action();
}

// ---- the start

/** Shows a model of the server. A server with several models loads it. */
async function use(names, model) {
  const path = names.length > 1 ? `ui/about?model=${encodeURIComponent(model)}` : "ui/about";
  const about = { ...await (await call(path)).json(), models: names, model };
  const values = { model, tokens: number(about.max_model_len), version: about.version };
  engine.start(about, tips);
  await chat.start(about);
  byId("status").textContent = t("{model} · {tokens} tokens of context · version {version}", values);
}

async function start() {
  try {
    const names = (await (await call("v1/models")).json()).data.map(({ id }) => id);
    byId("key-form").hidden = true;
    await use(names, chat.modelName(names));
    show(tabs.find((tab) => location.hash === `#${tab.getAttribute("aria-controls")}`) ?? tabs[0]);
  } catch (error) {
    if (byId("key-form").hidden) byId("status").textContent = error.message;
  }
}

translate();
listLanguages();
listenToTabs();
listenToTheme();
listenToKeys();
tips.listen();
drawers.listen();
models.listen(chat.listModels);
chat.onModel(use);
askForKey(() => { byId("key-form").hidden = false; byId("key").focus(); });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  start();
});
paint();
start();
