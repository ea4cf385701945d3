// Plays recorded runs step by step: what a step computes, and where it puts it. tools/record_runs.py makes them.

import { call } from "./api.js";
import { t } from "./i18n.js";

const byId = (id) => document.getElementById(id);
const SECONDS = 1.6; // of a step, while it plays

let runs = null;
let run = null;
let step = 0;
let timer = null;

export async function show(isShown) {
  if (!isShown) { play(false); return; }
  if (runs) return;
  runs = await (await call("ui/runs.json")).json();
  byId("run").replaceChildren(...runs.map(({ name, title }) => new Option(title, name)));
  byId("run").addEventListener("change", () => choose(byId("run").selectedIndex));
  byId("step").addEventListener("input", () => go(Number(byId("step").value)));
  byId("first").addEventListener("click", () => go(0));
  byId("back").addEventListener("click", () => go(step - 1));
  byId("next").addEventListener("click", () => go(step + 1));
  byId("play").addEventListener("click", () => play(timer === null));
  choose(0);
}

function choose(number) {
  play(false);
  run = runs[number];
  byId("about-run").textContent = run.text;
  byId("step").max = run.steps.length - 1;
  go(0);
}

function play(wanted) {
  clearInterval(timer);
  timer = wanted ? setInterval(() => (step + 1 < run.steps.length ? go(step + 1) : play(false)), 1000 * SECONDS) : null;
  byId("play").textContent = wanted ? t("Pause") : t("Play");
  byId("play").setAttribute("aria-pressed", wanted);
  if (wanted && step + 1 === run.steps.length) go(0);
}

function go(number) {
  step = Math.max(0, Math.min(run.steps.length - 1, number));
  byId("step").value = step;
  byId("place").textContent = t("step {number} of {count}", { number: step + 1, count: run.steps.length });
  byId("back").disabled = step === 0;
  byId("next").disabled = step === run.steps.length - 1;
  const now = run.steps[step];
  byId("story").replaceChildren(...story(now).map((text) => element("li", "", text)));
  byId("sequence").replaceChildren(sequence(now));
  byId("tables").replaceChildren(tables(now));
  byId("blocks").replaceChildren(...blocks(now));
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function colorOf(id) { return `request-${(id.charCodeAt(0) - 65) % 4}`; }
function visible(token) { return token.replaceAll("\n", "⏎").replace(/^ | $/g, "·") || "∅"; }
function count(number, what) { return `${number} ${what}${number === 1 ? "" : "s"}`; }

// ---- sentences

function story(now) {
  const told = [], before = step ? run.steps[step - 1] : null;
  const known = new Set(run.steps.slice(0, step).flatMap(({ parts }) => parts.map(({ id }) => id)));
  for (const part of now.parts) {
    const { id, positions, drafts, sampled, found } = part, prompt = run.prompts[id].length, tokens = positions.length;
    const back = known.has(id) && before && !before.parts.some((other) => other.id === id);
    let text;
    if (!known.has(id)) text = `${id} comes, with a prompt of ${count(prompt, "token")}.`;
    else if (back) text = `${id} goes on.`;
    else text = "";
    if (found) text += ` The keys and values of its first ${count(found, "token")} are there already, in blocks that can be found.`;
    if (drafts) {
      text += ` ${id} computes its last token and ${count(drafts, "guess").replace("guesss", "guesses")}: `
        + part.tokens.slice(-drafts).map((token) => `“${visible(token)}”`).join(" ");
      const kept = sampled.length - 1, share = kept === drafts ? "All of them are" : kept === 1 ? "One of them is" : `${kept} of them are`;
      text += kept ? `. ${share} what the model says, and it says one more.`
        : ". The model says something else, so they are dropped.";
    } else if (positions[0] < prompt && !back && tokens > 1) {
      text += positions.at(-1) + 1 < prompt ? ` ${id} computes a chunk of its prompt: ${count(tokens, "token")}.`
        : ` ${id} computes ${positions[0] ? "the rest of its prompt" : "its whole prompt"}: ${count(tokens, "token")}.`;
    } else if (tokens > 1) text += ` ${id} computes ${count(tokens, "token")} again.`;
    const said = sampled.map((token) => `“${visible(token)}”`).join(" ");
    if (sampled.length) text += ` ${id} says ${said}.`;
    told.push(text.trim());
  }
  for (const id of now.preempted) told.push(`There is no free block left. ${id}, which came last, gives back its blocks and waits.`);
  const waiting = now.waiting.filter((id) => !now.preempted.includes(id));
  if (waiting.length) told.push(`${waiting.join(" and ")} ${waiting.length === 1 ? "waits" : "wait"}.`);
  for (const id of now.ended) told.push(`${id} has ended. Its full blocks can still be found.`);
  return told;
}

// ---- pictures

function sequence(now) {
  const table = element("table", "sequence");
  const rows = { Request: "th", Token: "td", Position: "td", Slot: "td" };
  for (const [title, tag] of Object.entries(rows)) {
    const row = table.insertRow(), head = element("th", "", title);
    head.scope = "row";
    row.append(head);
    for (const part of now.parts) {
      if (tag === "th") {
        const cell = element("th", colorOf(part.id), part.id);
        cell.colSpan = part.tokens.length;
        cell.scope = "colgroup";
        row.append(cell);
        continue;
      }
      const values = { Token: part.tokens.map(visible), Position: part.positions, Slot: part.slots }[title];
      values.forEach((value, i) => {
        const isDraft = part.drafts && i >= values.length - part.drafts;
        const isKept = isDraft && i - (values.length - part.drafts) < part.sampled.length - 1;
        let kind = title === "Token" ? colorOf(part.id) : "";
        if (isDraft && title === "Token") kind += isKept ? " kept" : " dropped";
        row.append(element("td", kind, value));
      });
    }
  }
  return table;
}

function tables(now) {
  const table = element("table", "sequence");
  for (const part of now.parts) {
    const row = table.insertRow(), head = element("th", colorOf(part.id), part.id);
    head.scope = "row";
    row.append(head);
    for (const block of part.table) row.append(element("td", "", `block ${block}`));
  }
  return table;
}

// The blocks with the tokens that lie in them: of all steps so far, the last that was stored in each slot.
function blocks(now) {
  const slots = new Map();
  for (const { parts } of run.steps.slice(0, step + 1)) {
    for (const part of parts) part.slots.forEach((slot, i) => slots.set(slot, { id: part.id, token: part.tokens[i] }));
  }
  const fresh = new Set(now.parts.flatMap(({ slots: stored }) => stored));
  return [...now.blocks].map((state, i) => {
    const block = i + 1, number = Number(state);
    const item = element("li", ["free", "kept", "used"][number] ?? "shared");
    item.append(element("b", "", String(block)));
    for (let place = 0; place < run.block_size; place += 1) {
      const slot = block * run.block_size + place, found = number ? slots.get(slot) : null;
      item.append(element("span", found ? `${colorOf(found.id)}${fresh.has(slot) ? " fresh" : ""}` : "", found ? visible(found.token) : ""));
    }
    const users = number > 2 ? `, used by ${number - 1} requests` : ["free", "free, with content that can be found", "in use"][number];
    item.append(element("em", "", number > 2 ? `${number - 1} requests` : ["", "kept", ""][number]));
    item.setAttribute("aria-label", `Block ${block}: ${users}`);
    return item;
  });
}
