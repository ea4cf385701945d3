// Shows what the engine does: its blocks, requests, steps and times.

import { call, events } from "../api.js";
import { canvas, color, legend, ms, panel, prepare, strip } from "../draw.js";
import { element } from "../dom.js";
import { number, t } from "../i18n.js";
import * as lives from "./lives.js";
import { Ranks, Replicas } from "./ranks.js";
import { Tiers } from "./tiers.js";

const byId = (id) => document.getElementById(id);
const STEPS = 160; // that the chart of steps shows
const AGAIN = 2000; // milliseconds until a lost connection is tried again
const KINDS = [
  ["prompt", "prompt tokens computed"], ["decode", "tokens generated"], ["accepted", "drafts accepted"],
  ["rejected", "drafts rejected"], ["cached", "prompt tokens found in the cache"],
];
const STATIONS = {
  schedule: ["prompt", "Scheduling", "The scheduler chooses which requests compute how many tokens, and gives them blocks."],
  submit: ["decode", "Forward", "The step is handed to the device. On a CPU, the model's layers run here."],
  sample: ["accepted", "Sampling", "The sampler is started, which draws the next tokens. On a CPU it runs here."],
  wait: ["cached", "Waiting", "The engine waits for the results of the device."],
  update: ["rejected", "Results", "Sampled tokens are added to their requests; those that have ended give back their blocks."],
};
const HINTS = {
  numbers: "What this replica does now. Percentiles and rates are those of the last seconds.",
  map: "The KV cache consists of blocks, each with the keys and values of some tokens. Requests take blocks as they grow, and share those of equal beginnings. Free blocks keep their content until they are taken for something else, so that later prompts find it.",
  requests: "All requests are in one loop: each step computes some tokens of some of them, until all that is known of a request has been computed and the next token can be sampled.",
  steps: "Each bar is a step of the engine. Long prompts are computed in chunks, together with one token of each request that is generating, so that these do not have to wait.",
  stations: "Where the time of a step goes, on the thread of the engine's core. The average of the last steps.",
};

let page = null;
let cores = [];
let replicas = null; // if there are several
let connection = null;
let isWatched = false;

export function start(server, tips) {
  const isOther = page && page.server.model !== server.model;
  page = { server, ...tips };
  if (isOther) connection?.abort(); // the next one is to the other model
  if (!byId("timeline").hasChildNodes()) byId("timeline").append(new lives.Timeline().element);
}

// Begin or end to look. Nothing is sent, and nothing recorded, while nobody looks.
export function watch(wanted) {
  if (wanted === isWatched) return;
  isWatched = wanted;
  if (wanted) look();
  else connection?.abort();
}

async function look() {
  while (isWatched) {
    connection = new AbortController();
    try {
      for await (const event of events(await call(eventsPath(), undefined, connection.signal))) take(event);
      state(t("The stream has ended; trying again."));
    } catch (error) {
      if (error.name !== "AbortError") state(t("{problem} Trying again.", { problem: error.message }));
    }
    if (isWatched) await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
  }
}

function eventsPath() {
  const { models, model } = page.server;
  return models.length > 1 ? `ui/events?model=${encodeURIComponent(model)}` : "ui/events";
}

function state(text) {
  byId("engine-state").textContent = text;
  byId("engine-state").hidden = !text;
}

function take(event) {
  if (event.problem) { state(event.problem); return; }
  state(event.state === "ready" ? "" : t("The engine is {state}.", { state: t(event.state) }));
  if (event.is_whole && cores.length !== event.views.length) {
    cores = event.views.map((_, number) => new Core(number, event.views.length));
    replicas = cores.length > 1 ? new Replicas(page, cores.length) : null;
    byId("cores").replaceChildren(...(replicas ? [replicas.element] : []), ...cores.map((core) => core.element));
  }
  event.views.forEach((view, number) => cores[number]?.take(view, event.is_whole));
  paintReplicas();
}

function paintReplicas() {
  if (replicas && cores.every((core) => core.view)) replicas.paint(cores.map((core) => [core.view, core.map]));
}

export function repaint() {
  for (const core of cores) core.paint();
  paintReplicas();
}
addEventListener("resize", repaint);

class Core {
  constructor(number, count) {
    this.element = element("div", "core");
    this.map = "";
    this.steps = [];
    this.requests = new Map();
    this.view = null;
    if (count > 1) this.element.append(element("h2", "", t("Replica {number}", { number })));
    this.numbers = element("dl", "numbers");
    const numbers = panel("whole", "Now", HINTS.numbers);
    numbers.append(this.numbers);
    const blocks = panel("whole", "KV cache", HINTS.map);
    this.mapCanvas = canvas();
    this.mapText = element("p", "facts");
    blocks.append(this.mapCanvas, legend([["free", "free"], ["kept", "free, with content that can be found"],
      ["used", "used by one request"], ["shared", "shared by several"]]), this.mapText);
    const steps = panel("half", "Steps", HINTS.steps);
    this.stepCanvas = canvas();
    steps.append(this.stepCanvas, legend(KINDS));
    const stations = panel("half", "Time of a step", HINTS.stations);
    this.stationCanvas = canvas();
    this.stationList = element("ul", "legend");
    stations.append(this.stationCanvas, this.stationList);
    const requests = panel("whole", "Requests", HINTS.requests);
    const scroll = element("div", "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", t("Requests"));
    this.table = element("table", "requests");
    scroll.append(this.table);
    requests.append(scroll);
    this.tiers = new Tiers(page, page.server.disk_size);
    this.ranks = new Ranks(page, page.server.mesh);
    this.element.append(numbers, blocks, this.tiers.element, this.ranks.element, steps, stations, requests);
    this.mapCanvas.addEventListener("pointermove", (event) => this.tellCell(event));
    this.stepCanvas.addEventListener("pointermove", (event) => this.tellStep(event));
    for (const each of [this.mapCanvas, this.stepCanvas]) each.addEventListener("pointerleave", () => page.hideTip());
  }

  take(view, isWhole) {
    this.view = view;
    lives.take(view.lives, view.time);
    if (isWhole) { this.steps = []; this.requests.clear(); this.map = ""; }
    for (const { start, states } of view.cells) {
      this.map = this.map.slice(0, start) + states + this.map.slice(start + states.length);
    }
    this.steps = [...this.steps, ...view.steps].slice(-STEPS);
    const before = this.requests;
    this.requests = new Map(view.requests.map((request) => [request.id, { ...before.get(request.id), ...request }]));
    this.tiers.take(view, isWhole);
    this.ranks.take(view, this.map, isWhole);
    this.paint();
  }

  paint() {
    if (!this.view || !this.element.isConnected || byId("engine").hidden) return;
    this.paintNumbers();
    this.paintMap();
    this.tiers.paint();
    this.ranks.paint();
    this.paintSteps();
    this.paintStations();
    this.paintRequests();
  }

  paintNumbers() {
    const { view } = this, totals = view.totals, used = view.num_blocks - view.num_free;
    const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(0)} %` : "–");
    const times = (list) => (list.length ? list.map((value) => value.toFixed(value < 10 ? 1 : 0)).join(" · ") : "–");
    const rows = [
      ["Generated", t("{rate} tokens/s", { rate: view.rates.output ?? 0 })], ["Prompts", t("{rate} tokens/s", { rate: view.rates.prompt ?? 0 })],
      ["Running · waiting", `${view.num_running} · ${view.num_waiting}`], ["Blocks in use", share(used, view.num_blocks)],
      ["Prompts found in cache", share(totals.prefix_hits, totals.prefix_queries)],
      ["Preemptions", String(totals.preemptions)],
      ["First token, ms (50, 90, 99 %)", times(view.ttft)], ["Between tokens, ms (50, 90, 99 %)", times(view.gaps)],
    ];
    if (totals.external_queries) rows.push(["From beyond the pool", share(totals.external_hits, totals.external_queries)]);
    if (this.numbers.children.length !== rows.length) {
      this.numbers.replaceChildren(...rows.map(([name]) => {
        const pair = element("div");
        pair.append(element("dt", "", t(name)), element("dd"));
        return pair;
      }));
    }
    rows.forEach(([, value], i) => { this.numbers.children[i].lastChild.textContent = value; });
  }

  paintMap() {
    const cells = this.map.length, width = this.mapCanvas.clientWidth;
    const size = Math.max(4, Math.min(14, Math.floor(Math.sqrt(width * 190 / Math.max(1, cells)))));
    this.columns = Math.max(1, Math.floor(width / size));
    this.cellSize = size;
    const [context] = prepare(this.mapCanvas, Math.ceil(cells / this.columns) * size);
    const colors = [color("free"), color("kept"), color("used"), color("shared")];
    for (let i = 0; i < cells; i += 1) {
      const count = Number(this.map[i]);
      context.globalAlpha = count > 3 ? 1 : count === 3 ? 0.75 : 1;
      context.fillStyle = colors[Math.min(count, 3)];
      context.fillRect((i % this.columns) * size, Math.floor(i / this.columns) * size, size - 1, size - 1);
    }
    context.globalAlpha = 1;
    const { view } = this, per = view.blocks_per_cell;
    const values = { used: number(view.num_blocks - view.num_free), all: number(view.num_blocks), size: view.block_size };
    const what = t("{used} of {all} blocks of {size} tokens are in use", values);
    this.mapText.textContent = `${what}. ${per > 1 ? t("Each square is {count} blocks, and shows the most used one.", { count: per }) : ""}`;
    this.mapCanvas.setAttribute("aria-label", `${t("Map of the KV cache")}: ${what}`);
  }

  tellCell(event) {
    const column = Math.floor(event.offsetX / this.cellSize), cell = Math.floor(event.offsetY / this.cellSize) * this.columns + column;
    if (column >= this.columns || cell >= this.map.length) { page.hideTip(); return; }
    const per = this.view.blocks_per_cell, count = Number(this.map[cell]), first = 1 + cell * per;
    const name = per > 1 ? t("Blocks {first} to {last}", { first, last: Math.min(first + per - 1, this.view.num_blocks) }) : t("Block {number}", { number: first });
    const states = ["free", "free; its content can be found by later prompts", "used by one request"];
    let text = `${name}: ${states[count] ? t(states[count]) : t("used by {count} requests at once", { count: count > 8 ? "≥ 8" : count - 1 })}`;
    const users = [...this.requests.values()].filter((request) => request.blocks?.includes(first));
    if (per === 1 && users.length) text += ` (${users.map((request) => request.id).join(", ")})`;
    page.showTip(text, event.clientX, event.clientY);
  }

  paintSteps() {
    const height = 130, [context, width] = prepare(this.stepCanvas, height);
    const bar = this.bar = width / STEPS;
    const computed = (step) => KINDS.reduce((sum, [kind]) => sum + (kind === "cached" ? 0 : step[kind] ?? 0), 0);
    const most = Math.max(8, ...this.steps.map(computed)); // what was found costs nothing, and may be cut off
    const colors = Object.fromEntries(KINDS.map(([kind]) => [kind, color(kind)]));
    this.steps.forEach((step, i) => {
      let y = height;
      for (const [kind] of KINDS) {
        const size = Math.min(y - 16, (step[kind] ?? 0) / most * (height - 16));
        context.fillStyle = colors[kind];
        context.fillRect((STEPS - this.steps.length + i) * bar, y - size, Math.max(1, bar - 1), size);
        y -= size;
      }
    });
    context.fillStyle = color("soft");
    context.font = "12px system-ui, sans-serif";
    context.fillText(t("{count} tokens", { count: number(most) }), 2, 11);
    const last = this.steps.at(-1);
    this.stepCanvas.setAttribute("aria-label", last ? `${t("The last step computed")}: ${sentence(last)}` : t("There was no step so far"));
  }

  tellStep(event) {
    const step = this.steps[Math.floor(event.offsetX / this.bar) - STEPS + this.steps.length];
    if (!step) { page.hideTip(); return; }
    const time = Object.values(step.ms).reduce((sum, each) => sum + each, 0);
    page.showTip(`${t("Step {id}, requests: {count}", { id: step.id, count: step.requests })}: ${sentence(step)}; ${ms(time)}`, event.clientX, event.clientY);
  }

  paintStations() {
    const recent = this.steps.slice(-64), names = Object.keys(STATIONS);
    const averages = names.map((name) => recent.reduce((sum, step) => sum + (step.ms[name] ?? 0), 0) / Math.max(1, recent.length));
    const total = averages.reduce((sum, each) => sum + each, 0);
    const [context, width] = prepare(this.stationCanvas, 34);
    let x = 0;
    averages.forEach((each, i) => {
      const size = total ? each / total * width : 0;
      context.fillStyle = color(STATIONS[names[i]][0]);
      context.fillRect(x, 4, Math.max(0, size - 1), 26);
      x += size;
    });
    this.stationCanvas.setAttribute("aria-label", total ? t("A step takes {time}", { time: ms(total) }) : t("There was no step so far"));
    if (!this.stationList.children.length) {
      for (const name of names) {
        const [mark, label, hint] = STATIONS[name], item = legend([[mark, label]]).firstChild, button = element("button", "hint", "?");
        button.type = "button";
        button.dataset.hint = t(hint);
        button.setAttribute("aria-label", `${t(label)}: ${t(hint)}`);
        item.append(element("span"), button);
        this.stationList.append(item);
      }
    }
    names.forEach((_, i) => { this.stationList.children[i].querySelector("span").textContent = ` ${ms(averages[i])}`; });
  }

  paintRequests() {
    const head = element("thead"), body = element("tbody"), titles = head.insertRow();
    for (const [title, kind] of [["Request"], ["State"], ["Computed, of what it may become", "bar"], ["Tokens"], ["Found in the cache", "wide"], ["Preempted", "wide"]]) {
      const cell = element("th", kind, t(title));
      cell.scope = "col";
      titles.append(cell);
    }
    for (const request of this.requests.values()) {
      const row = body.insertRow();
      row.insertCell().textContent = request.id;
      row.insertCell().textContent = t(request.state);
      const cell = row.insertCell();
      cell.className = "bar";
      cell.append(bar(request));
      row.insertCell().textContent = t("{computed} of {known}", request);
      for (const value of [request.cached ?? 0, request.preemptions ?? 0]) {
        const more = row.insertCell();
        more.className = "wide";
        more.textContent = value || "";
      }
    }
    if (!this.requests.size) {
      const cell = body.insertRow().insertCell();
      cell.colSpan = 6;
      cell.textContent = t("There are none. Ask something in the chat, and come back here.");
    }
    this.table.replaceChildren(head, body);
  }
}

// The prompt, of it what was cached, and the output; as far as they have been computed.
function bar(request) {
  const most = Math.max(1, request.most), cached = Math.min(request.cached ?? 0, request.computed);
  return strip([["free", 0, most], ["line", 0, request.known], ["prompt", 0, Math.min(request.computed, request.prompt)],
    ["cached", 0, cached], ["decode", request.prompt, request.computed - request.prompt]], most);
}

function sentence(step) {
  return KINDS.filter(([kind]) => step[kind]).map(([kind, text]) => `${step[kind]} ${t(text)}`).join(", ") || t("nothing");
}


