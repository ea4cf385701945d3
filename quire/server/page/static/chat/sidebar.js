// The list of conversations: search, rename, export, delete, import.

import { agrees, button, byId, download, element } from "../dom.js";
import { t } from "../i18n.js";
import { Conversation } from "./conversation.js";
import * as store from "./store.js";
import { fromFile, toJson, toMarkdown } from "./transfer.js";

const DELAY = 200; // milliseconds after the last key until the search begins

let chat = null;
let timer = null;

/**
 * @param {object} actions
 * @param {(id: string) => void} actions.open
 * @param {(id: string) => void} actions.removed
 * @param {(id: string, title: string) => void} actions.renamed
 * @param {() => string} actions.current the id of the open conversation
 * @param {(message: string) => void} actions.problem
 */
export function listen(actions) {
  chat = actions;
  byId("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(refresh, DELAY); });
  byId("export-all").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFiles);
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  });
}

/** Shows the stored conversations that have the searched text. */
export async function refresh() {
  const wanted = byId("search").value.trim();
  const all = await store.list(), found = wanted ? await store.search(wanted) : null;
  const isWanted = ({ id, title }) => !found || found.has(id) || title.toLowerCase().includes(wanted.toLowerCase());
  const items = all.filter(isWanted).map(item);
  byId("conversations").replaceChildren(...items);
  byId("no-conversations").hidden = items.length > 0;
}

function item(record) {
  const made = element("li"), open = button(record.title || t("Untitled"), () => chat.open(record.id), "title");
  if (record.id === chat.current()) open.setAttribute("aria-current", "true");
  const menu = element("details", "menu"), summary = element("summary", "", "⋯"), choices = element("div", "choices");
  summary.setAttribute("aria-label", t("Actions for {title}", { title: record.title }));
  const choice = (label, action) => button(label, () => { menu.open = false; action(); });
  choices.append(
    choice(t("Rename"), () => rename(made, open, record)),
    choice(t("Export as JSON"), () => exportOne(record, "json")),
    choice(t("Export as Markdown"), () => exportOne(record, "md")),
    choice(t("Delete"), () => remove(record)),
  );
  menu.append(summary, choices);
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    summary.focus();
  });
  made.append(open, menu);
  return made;
}

function rename(place, open, record) {
  const field = element("input");
  field.value = record.title;
  field.setAttribute("aria-label", t("Title"));
  let isDone = false;
  const end = async (isKept) => {
    if (isDone) return;
    isDone = true;
    const title = field.value.trim();
    if (isKept && title) {
      await store.save({ ...await store.get(record.id), title });
      chat.renamed(record.id, title);
    }
    refresh();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  open.replaceWith(field);
  field.select();
  field.focus();
}

async function remove({ id, title }) {
  if (!await agrees(t("Delete the conversation “{title}”?", { title }), t("Delete"), t("Cancel"))) return;
  await store.remove(id);
  chat.removed(id);
  refresh();
}

// As it is stored now, which may be newer than the list.
async function load({ id }) { return new Conversation(await store.get(id), await store.messagesOf(id)); }

async function exportOne(record, kind) {
  const conversation = await load(record), name = `${record.title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.${kind}`;
  if (kind === "json") download(name, "application/json", toJson([conversation]));
  else download(name, "text/markdown", toMarkdown(conversation));
}

async function exportAll() {
  const all = await Promise.all((await store.list()).map(load));
  download("quire-conversations.json", "application/json", toJson(all));
}

async function importFiles(event) {
  const files = [...event.target.files];
  event.target.value = "";
  for (const file of files) {
    try {
      for (const { record, messages } of fromFile(file.name, await file.text())) await store.save(record, [...messages.values()]);
    } catch (error) {
      chat.problem(t("{name} cannot be imported: {error}", { name: file.name, error: error.message }));
    }
  }
  refresh();
}
