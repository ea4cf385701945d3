// What the views draw with.

import { element } from "./dom.js";
import { t } from "./i18n.js";

export function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

/** A section with a heading and a hint, both in English. */
export function panel(width, title, hint) {
  const made = element("section", `panel ${width}`);
  const heading = element("h2", "", t(title));
  const button = element("button", "hint", "?");
  button.type = "button";
  button.dataset.hint = t(hint);
  button.setAttribute("aria-label", `${t(title)}: ${t(hint)}`);
  heading.append(button);
  made.append(heading);
  return made;
}

export function legend(items) {
  const list = element("ul", "legend");
  for (const [name, text] of items) {
    const item = element("li");
    const mark = element("i");
    mark.style.background = `var(--${name})`;
    item.append(mark, t(text));
    list.append(item);
  }
  return list;
}

// A canvas of the width of its panel. Returns its context, with one unit a CSS pixel.
export function prepare(canvas, height) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

export function canvas() {
  const made = element("canvas");
  made.setAttribute("role", "img");
  return made;
}

export function ms(value) { return value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value < 10 ? value.toFixed(2) : Math.round(value)} ms`; }

// A bar of parts of a whole. parts: the name of a color, where it begins, and how long it is.
export function strip(parts, whole, height = 12) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", "100%");
  svg.setAttribute("height", height);
  svg.setAttribute("aria-hidden", "true");
  for (const [name, start, count] of parts) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.setAttribute("x", `${100 * start / whole}%`);
    rect.setAttribute("width", `${100 * Math.max(0, count) / whole}%`);
    rect.setAttribute("height", height);
    rect.style.fill = `var(--${name})`;
    svg.append(rect);
  }
  return svg;
}

export function bytes(count) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"], power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  const value = count / 1024 ** power;
  return `${power && value < 100 ? value.toPrecision(value < 10 ? 2 : 3) : Math.round(value)} ${units[power]}`;
}
