// How fast models were in this browser's chats.

const KEY = "quire-speeds";
const MOST = 20; // answers of a model that are kept

function all() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

/** @param {{ model: string, figures: { rate?: number, first?: number } }} answer */
export function note({ model, figures }) {
  if (!figures.rate) return;
  const speeds = all();
  speeds[model] = [...speeds[model] ?? [], [figures.rate, figures.first]].slice(-MOST);
  localStorage.setItem(KEY, JSON.stringify(speeds));
}

/** @returns {{ rate: number, first: number, count: number } | null} medians: tokens per second, and milliseconds */
export function of(model) {
  const found = all()[model];
  if (!found?.length) return null;
  const median = (i) => found.map((each) => each[i]).sort((a, b) => a - b)[found.length >> 1];
  return { rate: median(0), first: median(1), count: found.length };
}
