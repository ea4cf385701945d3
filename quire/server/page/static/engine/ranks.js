// Draws the ranks of a replica, and the replicas beside each other.

import { bytes, legend, panel, strip } from "../draw.js";
import { element } from "../dom.js";

const LOOKS = 8; // that the use of processors is the average of
const RANKS = "Ranks are processes that compute every step together. Stages of a pipeline have some of the layers each, and hand each step on. The ranks of a stage divide each layer, or the tokens. Each rank has its part of every block of the KV cache.";
const REPLICAS = "Replicas are whole copies of the model. Each request is sent to one of them, where it shares steps and blocks with the others there.";
const BLOCKS = [["used", "blocks in use"], ["kept", "free blocks with content that can be found"], ["free", "free blocks"]];

// The blocks of a view as parts of a bar: those in use, and those that later prompts can find.
function blocks(view, map, scale = 1) {
  const used = view.num_blocks - view.num_free;
  const cells = [...map].filter((state) => state === "1").length / Math.max(1, map.length);
  const kept = Math.min(view.num_free, Math.round(cells * view.num_blocks));
  return [["free", 0, view.num_blocks * scale], ["kept", used * scale, kept * scale], ["used", 0, used * scale]];
}

// A line with a name, a bar and a value. telling: what the pointer is told, a function.
function line(page, telling) {
  const row = element("div", "line"), name = element("span"), bar = element("div"), value = element("span", "value");
  row.append(name, bar, value);
  row.addEventListener("pointermove", (event) => page.showTip(telling(), event.clientX, event.clientY));
  row.addEventListener("pointerleave", () => page.hideTip());
  return { row, set: (label, drawn, text) => { name.textContent = label; bar.replaceChildren(drawn); value.textContent = text; } };
}

export class Ranks {
  constructor(page, mesh) {
    this.page = page;
    this.mesh = mesh;
    this.looks = [];
    this.element = panel("whole", "Ranks", RANKS);
    this.element.hidden = true;
    this.stages = element("div", "stages");
    this.element.append(this.stages, legend([...BLOCKS, ["decode", "processors in use"]]));
  }

  take(view, map, isWhole) {
    this.view = view;
    this.map = map;
    if (isWhole) this.looks = [];
    this.looks = [...this.looks, { time: view.time, seconds: view.ranks.map((rank) => rank.seconds) }].slice(-LOOKS - 1);
    if (this.lines?.length !== view.ranks.length) this.build();
  }

  build() {
    const { stages, contexts, parts } = this.mesh, count = this.view.ranks.length, inStage = contexts * parts;
    this.element.hidden = !count;
    this.lines = [];
    this.stages.replaceChildren();
    for (let stage = 0; stage * inStage < count; stage += 1) {
      const box = element("div", "stage");
      if (stages > 1) box.append(element("h3", "", `Stage ${stage + 1} of ${stages}`));
      for (let number = stage * inStage; number < (stage + 1) * inStage; number += 1) {
        const within = number - stage * inStage, what = [];
        if (parts > 1) what.push(`part ${1 + within % parts} of ${parts} of each layer`);
        if (contexts > 1) what.push(`share ${1 + Math.floor(within / parts)} of ${contexts} of the tokens`);
        if (stages > 1) what.push(`the layers of stage ${stage + 1}`);
        const memory = line(this.page, () => `Rank ${number} keeps its part of every block: ${bytes(this.view.ranks[number].block_bytes)} of each, for ${what.join(", ")}.`);
        const busy = line(this.page, () => `The process of rank ${number} used ${this.busy(number)?.toFixed(2) ?? "an unknown number of"} processors in the last seconds. A rank that others wait for uses the most.`);
        const rank = element("div", "rank");
        rank.append(element("h4", "", `Rank ${number}`), element("p", "facts", what.slice(0, stages > 1 ? -1 : undefined).join(", ") || "the layers of this stage"), memory.row, busy.row);
        box.append(rank);
        this.lines.push({ memory, busy });
      }
      this.stages.append(box);
    }
  }

  // How many processors a rank has used on average.
  busy(number) {
    const first = this.looks[0], last = this.looks.at(-1), before = first?.seconds[number], after = last?.seconds[number];
    if (before === undefined || after === undefined || last.time <= first.time) return undefined;
    return Math.max(0, (after - before) / (last.time - first.time));
  }

  paint() {
    if (!this.view?.ranks.length) return;
    const sizes = this.view.ranks.map((rank) => rank.block_bytes), largest = Math.max(...sizes);
    const used = sizes.map((_, number) => this.busy(number)), most = Math.max(1, ...used.map((each) => each ?? 0));
    this.lines.forEach(({ memory, busy }, number) => {
      const parts = blocks(this.view, this.map, sizes[number] / largest);
      memory.set("KV cache", strip(parts, this.view.num_blocks), bytes(sizes[number] * this.view.num_blocks));
      busy.set("Processors", strip([["free", 0, most], ["decode", 0, used[number] ?? 0]], most), used[number]?.toFixed(2) ?? "–");
    });
  }
}

export class Replicas {
  constructor(page, count) {
    this.views = [];
    this.element = panel("whole replicas", "Replicas", REPLICAS);
    this.lines = Array.from({ length: count }, (_, number) => ({
      blocks: line(page, () => `Replica ${number} uses ${this.views[number][0].num_blocks - this.views[number][0].num_free} of its ${this.views[number][0].num_blocks} blocks.`),
      requests: line(page, () => `Replica ${number} computes ${this.views[number][0].num_running} requests in each step, and ${this.views[number][0].num_waiting} wait for their turn.`),
    }));
    for (const { blocks: first, requests } of this.lines) this.element.append(first.row, requests.row);
    this.element.append(legend([...BLOCKS, ["decode", "running requests"], ["rejected", "waiting requests"]]));
  }

  // views: of each replica, with its map.
  paint(views) {
    this.views = views;
    const most = Math.max(8, ...views.map(([view]) => view.num_running + view.num_waiting));
    views.forEach(([view, map], number) => {
      const { blocks: first, requests } = this.lines[number], { num_running: running, num_waiting: waiting } = view;
      first.set(`Replica ${number}`, strip(blocks(view, map), view.num_blocks), `${Math.round(100 * (1 - view.num_free / view.num_blocks))} % in use`);
      requests.set("", strip([["free", 0, most], ["decode", 0, running], ["rejected", running, waiting]], most), `${running} running, ${waiting} waiting`);
    });
  }
}
