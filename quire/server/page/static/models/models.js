// The models of the server: their sizes and states, loading and unloading, and downloads.

import { call, lines } from "../api.js";
import { bytes } from "../draw.js";
import { button, byId, element, problem } from "../dom.js";
import { duration, number, t } from "../i18n.js";
import * as speeds from "./speeds.js";

const PAUSE = 2000; // milliseconds between two looks while the tab is open
const LATEST = ":latest";
const STATES = {
  loaded: "in memory", loading: "being loaded", sleeping: "sleeping", failed: "failed", unloaded: "on disk",
};

let isShown = false;
let timer = null;
let pulling = null;
let onList = () => {};

/** @param {(names: string[]) => void} changed is called with the names that requests can have */
export function listen(changed) {
  onList = changed;
  byId("pull").addEventListener("submit", (event) => { event.preventDefault(); pull(byId("pull-name").value.trim()); });
  byId("pull-stop").addEventListener("click", () => pulling?.abort());
}

export function show(shown) {
  if (shown === isShown) return;
  isShown = shown;
  clearTimeout(timer);
  if (shown) refresh();
}

/** An answer of the server, or null if it forbids the request. */
async function ask(path) {
  try {
    return await (await call(path)).json();
  } catch {
    return null;
  }
}

/** @returns {Promise<object[]>} { name, state, canLoad, size, details, length, memory, requests, error } */
async function collect() {
  const [served, tags, active] = await Promise.all(["v1/models", "api/tags", "api/ps"].map(ask));
  const loadsModels = served?.data.some(({ status }) => status), router = loadsModels ? await ask("models") : null;
  const found = new Map();
  const at = (name) => {
    const short = name.endsWith(LATEST) ? name.slice(0, -LATEST.length) : name;
    if (!found.has(short)) found.set(short, { name: short, state: "unloaded", canLoad: false });
    return found.get(short);
  };
  for (const { id, max_model_len: length } of served?.data ?? []) at(id).length = length;
  for (const { name, size, details } of tags?.models ?? []) Object.assign(at(name), { size, details });
  for (const { name } of active?.models ?? []) at(name).state = "loaded";
  for (const { id, status, memory, needed_memory: needed, requests } of router?.data ?? []) {
    Object.assign(at(id), { state: status.value, error: status.error, memory: memory || needed, requests, canLoad: true });
  }
  onList((served?.data ?? []).map(({ id }) => id));
  return [...found.values()];
}

async function refresh() {
  const models = await collect();
  byId("models-list").replaceChildren(...models.map(row));
  byId("no-models").hidden = models.length > 0;
  clearTimeout(timer);
  if (isShown) timer = setTimeout(refresh, PAUSE);
}

function row(model) {
  const { name, state, size, details = {}, length, memory, requests, error } = model;
  const made = element("tr"), head = element("th", "", name), speed = speeds.of(name);
  head.scope = "row";
  const text = (value) => made.insertCell().append(value ?? "–");
  made.append(head);
  const mark = element("span", `state ${state}`, t(STATES[state] ?? state));
  if (error) mark.title = error;
  text(mark);
  if (requests) mark.append(` · ${t("requests: {count}", { count: requests })}`);
  text(size ? bytes(size) : null);
  text(memory ? bytes(memory) : null);
  text([details.parameter_size, details.quantization_level].filter(Boolean).join(" · ") || null);
  text(length ? number(length) : null);
  text(speed ? t("{rate} tokens/s, first after {time}", { rate: number(speed.rate, 1), time: duration(Math.round(speed.first)) }) : null);
  text(action(model) ?? "");
  return made;
}

function action({ name, state, canLoad }) {
  if (!canLoad) return null;
  const isIn = state === "loaded" || state === "sleeping";
  const made = button(isIn ? t("Unload") : t("Load"), () => change(isIn ? "models/unload" : "models/load", name, made), "small");
  made.disabled = state === "loading";
  made.setAttribute("aria-label", `${made.textContent}: ${name}`);
  return made;
}

async function change(path, model, place) {
  place.disabled = true;
  byId("models-problems").replaceChildren();
  try {
    await call(path, { model });
  } catch (error) {
    byId("models-problems").append(problem(error.message));
  }
  refresh();
}

// ---- downloads

async function pull(name) {
  if (!name || pulling) return;
  pulling = new AbortController();
  byId("models-problems").replaceChildren();
  const files = new Map(), began = performance.now();
  showPull(name, files, "", began);
  try {
    for await (const line of lines(await call("api/pull", { model: name, stream: true }, pulling.signal))) {
      if (line.error) throw new Error(line.error);
      if (line.total) files.set(line.digest ?? line.status, line);
      showPull(name, files, line.status ?? "", began);
    }
    byId("pull-text").textContent = t("{name} was downloaded.", { name });
    byId("pull-name").value = "";
  } catch (error) {
    byId("pull-text").textContent = "";
    if (error.name !== "AbortError") byId("models-problems").append(problem(error.message));
  }
  pulling = null;
  byId("pull-bar").hidden = byId("pull-stop").hidden = true;
  byId("pull-start").disabled = false;
  refresh();
}

function showPull(name, files, status, began) {
  const sum = (field) => [...files.values()].reduce((total, line) => total + (line[field] ?? 0), 0);
  const total = sum("total"), done = sum("completed"), bar = byId("pull-bar"), seconds = (performance.now() - began) / 1000;
  byId("pull-start").disabled = true;
  bar.hidden = byId("pull-stop").hidden = false;
  if (total) Object.assign(bar, { max: total, value: done });
  else bar.removeAttribute("value");
  byId("pull-text").textContent = total
    ? t("{name}: {done} of {total}, {rate}/s", { name, done: bytes(done), total: bytes(total), rate: bytes(done / Math.max(seconds, 0.1)) }) : `${name}: ${status}`;
}
