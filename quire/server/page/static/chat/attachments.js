// Files that go with the next message: chosen, dragged or pasted. Pictures and recordings if the model takes them, and
// text files always.

import { byId, element, iconButton } from "../dom.js";
import { t } from "../i18n.js";

const MOST_TEXT = 2 << 20; // bytes of a text file
const AUDIO = ["wav", "mp3", "flac", "ogg", "m4a", "webm"];

let about = null;
let tell = () => {};
let chosen = [];

/** @param {(message: string) => void} problem */
export function start(server, problem) {
  about = server;
  tell = problem;
  byId("files").accept = [...(takes("image") ? ["image/*"] : []), ...(takes("audio") ? ["audio/*"] : []), "text/*", ...".md .json .csv .py .js .ts .c .cpp .rs .go .java .toml .yaml .yml .log .sql .sh".split(" ")].join(",");
}

export function listen() {
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // so that the same file can be chosen again
    await add(files);
  });
  byId("prompt").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  const place = byId("chat");
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  place.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place.classList.add("dropping");
  });
  place.addEventListener("dragleave", (event) => { if (!place.contains(event.relatedTarget)) place.classList.remove("dropping"); });
  place.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
}

export function count() { return chosen.length; }

/** The chosen files, which the next message does not have any more. @returns {object[]} */
export function take() {
  const taken = chosen;
  put([]);
  return taken;
}

/** The chosen files, which stay so. */
export function all() { return chosen; }

export function put(attachments) {
  chosen = attachments;
  show();
}

/** @returns {HTMLElement} an attachment of a message */
export function shown({ kind, name, url, text }) {
  if (kind === "image") return Object.assign(element("img"), { src: url, alt: t("Picture {name}", { name }), title: name });
  const made = element("span", "file", kind === "audio" ? `♪ ${name}` : `▤ ${name}`);
  if (text) made.title = text.slice(0, 500);
  return made;
}

function takes(kind) { return about.has_chat_template && { image: about.takes_pictures, audio: about.takes_audio, text: true }[kind]; }

async function add(files) {
  try {
    const added = await Promise.all(files.map(read));
    put([...chosen, ...added]); // others may have been added meanwhile
  } catch (error) {
    tell(error.message);
  }
}

async function read(file) {
  const { name } = file, kind = kindOf(file);
  if (kind === "text") {
    const text = file.size <= MOST_TEXT ? await file.text() : "\0";
    if (text.includes("\0")) throw new Error(t("{name} is no text file of at most 2 MiB.", { name }));
    return { kind, name, text };
  }
  if (!takes(kind)) throw new Error(kind === "image" ? t("This model takes no pictures.") : t("This model takes no audio."));
  return { kind, name, url: await dataUrl(file) };
}

function kindOf({ type, name }) {
  if (type.startsWith("image/") && type !== "image/svg+xml") return "image";
  return type.startsWith("audio/") || AUDIO.includes(name.split(".").at(-1).toLowerCase()) ? "audio" : "text";
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(t("{name} cannot be read: {error}", { name: file.name, error: reader.error.message })));
    reader.readAsDataURL(file);
  });
}

function show() {
  byId("attachments").replaceChildren(...chosen.map((attachment) => {
    const item = element("li");
    item.append(shown(attachment), iconButton("×", t("Remove {name}", attachment), () => {
      put(chosen.filter((other) => other !== attachment));
      byId("attach").focus();
    }));
    return item;
  }));
  byId("attachments").hidden = !chosen.length;
}
