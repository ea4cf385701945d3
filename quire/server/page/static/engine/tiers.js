// Draws what lies in the tiers beyond the KV cache, and what moves between them and it.

import { bytes, canvas, color, legend, panel, prepare, strip } from "../draw.js";
import { element } from "../dom.js";

const LOOKS = 160; // that the chart of moves shows
const HINT = "Blocks are copied to these tiers when a step has filled them, and can be found there when the KV cache needs their place for something else. Before a request runs, those of its blocks that only a tier has are loaded.";
const NAMES = { memory: "CPU memory", disk: "Disk" };
const STATES = [
  ["free", "free", "are free"], ["kept", "filled", "have content that later prompts can find"],
  ["prompt", "being saved", "are being copied out of the KV cache"],
  ["decode", "being loaded", "are being copied into the KV cache"],
];
const MOVES = [["decode", "loaded, into the KV cache"], ["prompt", "saved, out of it"], ["rejected", "failed"]];

export class Tiers {
  // limit: bytes of the disk tier, if it has a limit.
  constructor(page, limit) {
    this.page = page;
    this.limit = limit;
    this.tiers = [];
    this.element = panel("whole", "Beyond the KV cache", HINT);
    this.element.hidden = true;
  }

  take(view, isWhole) {
    if (isWhole) {
      for (const tier of this.tiers) tier.element.remove();
      this.tiers = view.tiers.map(() => new Tier(this.page));
      this.element.append(...this.tiers.map((tier) => tier.element));
      this.element.hidden = !view.tiers.length;
    }
    view.tiers.forEach((tier, i) => {
      const most = tier.most || (this.limit ? Math.floor(this.limit / view.block_bytes) : 0);
      this.tiers[i]?.take({ saving: 0, loading: 0, saved: 0, loaded: 0, failed: 0, left: 0, cells: "", ...tier, most }, view.block_bytes, view.time);
    });
  }

  paint() { for (const tier of this.tiers) tier.paint(); }
}

class Tier {
  constructor(page) {
    this.page = page;
    this.looks = [];
    this.element = element("div", "tier");
    this.title = element("h3");
    const place = element("div"), moves = element("div");
    this.map = canvas();
    this.bar = element("div");
    this.facts = element("p", "facts");
    this.legend = legend(STATES);
    place.append(this.map, this.bar, this.legend, this.facts);
    this.moves = canvas();
    this.counts = element("p", "facts");
    moves.append(this.moves, legend(MOVES), this.counts);
    this.element.append(this.title, place, moves);
    this.map.addEventListener("pointermove", (event) => this.tellCell(event));
    this.moves.addEventListener("pointermove", (event) => this.tellMoves(event));
    for (const each of [this.map, this.moves]) each.addEventListener("pointerleave", () => page.hideTip());
  }

  take(view, blockBytes, time) {
    const before = this.view ?? view;
    this.view = view;
    this.blockBytes = blockBytes;
    const moved = Object.fromEntries(["loaded", "saved", "failed"].map((name) => [name, Math.max(0, view[name] - before[name])]));
    this.looks = [...this.looks, { time, ...moved }].slice(-LOOKS);
  }

  paint() {
    if (!this.view) return;
    const { view } = this, count = (number) => number.toLocaleString("en");
    this.title.textContent = NAMES[view.kind];
    const full = view.most ? `${count(view.filled)} of ${count(view.most)} blocks` : `${count(view.filled)} blocks`;
    const size = bytes(view.filled * this.blockBytes);
    this.facts.textContent = view.most ? `${full}: ${size} of ${bytes(view.most * this.blockBytes)}` : `${full} are known to be there: ${size}`;
    this.facts.textContent += `; ${count(view.loading + view.saving)} more on the way.`;
    this.counts.textContent = `While somebody looks: ${count(view.loaded)} loaded, ${count(view.saved)} saved, ${count(view.left)} left for newer ones, ${count(view.failed)} failed.`;
    this.map.hidden = this.legend.hidden = !view.cells;
    this.bar.replaceChildren(...(view.cells || !view.most ? [] : [strip([["free", 0, view.most], ["kept", 0, Math.min(view.filled, view.most)]], view.most, 14)]));
    if (view.cells) this.paintMap(full);
    this.paintMoves();
  }

  paintMap(full) {
    const cells = this.view.cells.length, width = this.map.clientWidth;
    const size = this.size = Math.max(4, Math.min(14, Math.floor(Math.sqrt(width * 110 / cells))));
    const columns = this.columns = Math.max(1, Math.floor(width / size));
    const [context] = prepare(this.map, Math.ceil(cells / columns) * size), colors = STATES.map(([name]) => color(name));
    for (let i = 0; i < cells; i += 1) {
      context.fillStyle = colors[Number(this.view.cells[i])];
      context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
    }
    this.map.setAttribute("aria-label", `Map of ${NAMES[this.view.kind]}: ${full} are filled`);
  }

  // What was loaded goes up from the line in the middle, what was saved goes down.
  paintMoves() {
    const height = 110, [context, width] = prepare(this.moves, height), middle = height / 2;
    const bar = this.barWidth = width / LOOKS, looks = this.looks, room = middle - 14;
    const most = Math.max(4, ...looks.flatMap((look) => [look.loaded, look.saved, look.failed]));
    context.fillStyle = color("line");
    context.fillRect(0, middle - 0.5, width, 1);
    looks.forEach((look, i) => {
      const x = (LOOKS - looks.length + i) * bar, wide = Math.max(1, bar - 1);
      for (const [name, mark, up] of [["loaded", "decode", true], ["saved", "prompt", false], ["failed", "rejected", false]]) {
        const size = look[name] / most * room;
        context.fillStyle = color(mark);
        context.fillRect(x, up ? middle - 1 - size : middle + 1, wide, size);
      }
    });
    context.fillStyle = color("soft");
    context.font = "12px system-ui, sans-serif";
    context.fillText(`${most.toLocaleString("en")} blocks loaded`, 2, 11);
    context.fillText(`${most.toLocaleString("en")} saved`, 2, height - 3);
    const sum = (name) => looks.reduce((total, look) => total + look[name], 0);
    this.moves.setAttribute("aria-label", `Moves of the last seconds: ${sum("loaded")} blocks loaded, ${sum("saved")} saved, ${sum("failed")} failed`);
  }

  tellCell(event) {
    const column = Math.floor(event.offsetX / this.size), cell = Math.floor(event.offsetY / this.size) * this.columns + column;
    const { cells, most } = this.view;
    if (column >= this.columns || cell >= cells.length) { this.page.hideTip(); return; }
    const per = Math.ceil(most / cells.length), first = cell * per + 1, last = Math.min(first + per - 1, most);
    const [, , text] = STATES[Number(cells[cell])];
    const what = per > 1 ? `Places ${first} to ${last}: some ${text}` : `Place ${first}: ${text.replace(/^are /, "is ").replace(/^have /, "has ")}`;
    this.page.showTip(what, event.clientX, event.clientY);
  }

  tellMoves(event) {
    const look = this.looks[Math.floor(event.offsetX / this.barWidth) - LOOKS + this.looks.length];
    if (!look) { this.page.hideTip(); return; }
    const ago = Math.round(this.looks.at(-1).time - look.time);
    this.page.showTip(`${ago ? `${ago} s ago` : "Now"}: ${look.loaded} blocks loaded, ${look.saved} saved${look.failed ? `, ${look.failed} failed` : ""}`, event.clientX, event.clientY);
  }
}
