// Why a request was slow: the phases of its life, as the engine recorded them.

import { panel } from "../draw.js";
import { button, element } from "../dom.js";
import { duration, number, t } from "../i18n.js";

const MOST = 100; // requests that are kept
const known = new Map(); // by id, of all replicas, the latest last
let chosen = null; // id
let onChange = () => {};

/** @param {object[]} lives new or changed ones @param {number} time of the engine, in seconds */
export function take(lives, time) {
  for (const life of lives) {
    known.delete(life.id);
    known.set(life.id, { chunks: [], preemptions: [], ...life, now: time });
  }
  while (known.size > MOST) known.delete(known.keys().next().value);
  if (!lives.length) return;
  onChange();
  document.dispatchEvent(new Event("lives"));
}

function find(id) { return id && [...known.values()].findLast((life) => life.id.includes(id)); }

/** @returns {HTMLElement | null} a button that shows what the engine did for a request, if it was recorded */
export function link(id) {
  if (!find(id)) return null;
  return button(t("Why did this take so long?"), () => {
    chosen = find(id)?.id ?? null;
    document.getElementById("tab-engine").click();
    onChange();
    document.getElementById("lives").scrollIntoView();
  }, "small");
}

/** The phases of a life: { name, color, parts: [[begin, end]], seconds, text }. Times are seconds after its arrival. */
export function phasesOf(life) {
  const { arrived, chunks, preemptions } = life, after = (time) => time - arrived;
  const end = life.ended || Math.max(life.last, life.now);
  const phases = [];
  const add = (name, color, parts, text) => {
    const seconds = parts.reduce((sum, [from, to]) => sum + Math.max(0, to - from), 0);
    if (parts.length) phases.push({ name, color, parts, seconds, text });
  };
  add(t("Queue"), "rejected", [[0, after(life.began || end)]], t("until its first step began"));
  const prompt = chunks.reduce((sum, [, , tokens]) => sum + tokens, 0);
  const found = life.cached ? t("{count} more tokens were found in the cache", { count: number(life.cached) }) : t("nothing was found in the cache");
  const chunkText = t("{tokens} tokens, chunks: {count}; {found}", { tokens: number(prompt), count: chunks.length, found });
  add(t("Prompt"), "prompt", chunks.map(([from, to]) => [after(from), after(to)]), chunkText);
  if (life.first) {
    const text = t("{tokens} tokens, steps: {count}", { tokens: number(life.output), count: number(life.steps) });
    const drafts = life.accepted || life.rejected
      ? `; ${t("{accepted} drafts accepted, {rejected} rejected", { accepted: life.accepted ?? 0, rejected: life.rejected ?? 0 })}` : "";
    add(t("Output"), "decode", without([[life.first, life.last]], preemptions).map((part) => part.map(after)), text + drafts);
  }
  add(t("Preempted"), "accepted", preemptions.map((part) => part.map(after)), t("its blocks were needed for others; it had to wait, and was computed again"));
  const busy = phases.reduce((sum, { seconds }) => sum + seconds, 0), rest = after(end) - busy;
  if (rest > 0.002) add(t("Between steps"), "free", [[after(end) - rest, after(end)]], t("other requests were computed, or the engine was busy otherwise"));
  return { phases: phases.map((phase) => ({ ...phase, seconds: Math.min(phase.seconds, after(end)) })), seconds: after(end) };
}

// Intervals without other intervals.
function without(parts, holes) {
  let found = parts;
  for (const [from, to] of holes) {
    found = found.flatMap(([begin, end]) => (to <= begin || from >= end ? [[begin, end]]
      : [[begin, from], [to, end]].filter(([a, b]) => b > a)));
  }
  return found;
}

export class Timeline {
  constructor() {
    this.element = panel("whole", t("Timeline of a request"), t("Where the time of one request went, from its arrival at the server to its last token. Requests that run while this tab is open are recorded."));
    this.element.id = "lives";
    this.select = element("select");
    this.select.setAttribute("aria-label", t("Request"));
    this.select.addEventListener("change", () => { chosen = this.select.value; this.paint(); });
    this.verdict = element("p", "facts");
    this.lanes = element("div", "lanes");
    const scroll = element("div", "scroll");
    scroll.append(this.lanes);
    this.element.append(this.select, this.verdict, scroll);
    onChange = () => { this.list(); this.paint(); };
    this.list();
    this.paint();
  }

  list() {
    const lives = [...known.values()].reverse();
    if (!known.has(chosen)) chosen = null;
    const shown = lives.map((life) => new Option(`${life.id} · ${duration(Math.round(1000 * phasesOf(life).seconds))}`, life.id));
    if (document.activeElement !== this.select) this.select.replaceChildren(...shown);
    this.select.value = chosen ?? lives[0]?.id ?? "";
    this.select.hidden = !lives.length;
  }

  paint() {
    const life = known.get(chosen) ?? [...known.values()].at(-1);
    if (!life) {
      this.verdict.textContent = t("No request has run since this tab was opened.");
      this.lanes.replaceChildren();
      return;
    }
    const { phases, seconds } = phasesOf(life), whole = Math.max(seconds, 1e-6);
    const longest = phases.reduce((a, b) => (b.seconds > a.seconds ? b : a));
    const values = { phase: longest.name, share: Math.round(100 * longest.seconds / whole), time: ms(whole) };
    const state = life.ended ? "" : ` ${t("It is still running.")}`;
    this.verdict.textContent = `${t("It took {time}. The longest part was “{phase}”: {share} %.", values)}${state}`;
    this.lanes.replaceChildren(...phases.map((phase) => lane(phase, whole)));
  }
}

function ms(seconds) { return duration(Math.round(1000 * seconds)); }

function lane({ name, color, parts, seconds, text }, whole) {
  const row = element("div", "lane"), bar = element("div", "lane-bar");
  for (const [from, to] of parts) {
    const part = element("i");
    part.style.left = `${100 * from / whole}%`;
    part.style.width = `${100 * Math.max(0, to - from) / whole}%`;
    part.style.background = `var(--${color})`;
    part.title = `${ms(from)} – ${ms(to)}`;
    bar.append(part);
  }
  row.append(element("strong", "", name), bar, element("span", "value", ms(seconds)), element("span", "facts", text));
  return row;
}
