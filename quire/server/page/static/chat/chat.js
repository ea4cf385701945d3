// The chat: sends messages, streams answers, and shows the open conversation.

import { call, events } from "../api.js";
import { copy } from "../copying.js";
import { byId, element, problem } from "../dom.js";
import * as lives from "../engine/lives.js";
import { t } from "../i18n.js";
import * as attachments from "./attachments.js";
import { Conversation, newId } from "./conversation.js";
import * as options from "./options.js";
import { Reply } from "./reply.js";
import { pathOf, requestBody } from "./request.js";
import * as sidebar from "./sidebar.js";
import { curl, python } from "./snippets.js";
import * as speeds from "../models/speeds.js";
import * as store from "./store.js";
import { AnswerView, UserView } from "./views.js";

const OPEN = "quire-conversation", DRAFT = "quire-draft"; // in the storage of the browser's tab
const KEPT = 2000; // milliseconds between two times that an unfinished answer is stored
const NEAR = 120; // pixels from the end within which new text is followed

let about = null;
let conversation = new Conversation();
let isFollowing = true;
const sizes = new ResizeObserver(() => follow()); // of the messages: text arrives, formulas are drawn
const views = new Map(); // of messages, by id
const running = new Map(); // from the ids of unfinished answers to { conversation, stop, reply }

const actions = {
  edit: (message, text) => send(conversation.parentOf(message), text, message.attachments ?? []),
  regenerate: (message) => answer(conversation.parentOf(message)),
  proceed,
  choose,
  sendResults(message, results) {
    const read = readOptions();
    if (read) answer(conversation.add(message, { role: "tool", results }), read);
  },
  alternatives: (message) => conversation.alternatives(message),
  explain: (message) => lives.link(message.request),
};

/** The model to use first, of those that the server has. */
export function modelName(names) { return options.modelName(names); }

/** @param {(names: string[], model: string) => Promise<void>} use is called when the user chooses a model */
export function onModel(use) {
  byId("options").elements.model.addEventListener("change", async (event) => {
    try {
      await use(about.models, event.target.value);
    } catch (error) {
      tell(error.message);
    }
  });
}

export async function start(server) {
  const isFirst = about === null;
  about = server;
  options.start(about);
  attachments.start(about, tell);
  byId("chat").classList.toggle("one-model", about.models.length < 2);
  if (!about.generates) tell(t("This model makes embeddings or scores, and generates no text."));
  if (!isFirst) return;
  listen();
  byId("prompt").value = sessionStorage.getItem(DRAFT) ?? "";
  const id = sessionStorage.getItem(OPEN);
  try {
    if (id) await open(id);
    await sidebar.refresh();
  } catch (error) {
    tell(t("This browser does not store conversations: {error}", { error: error.message }));
  }
}

/** Shows the models to choose from. */
export function listModels(names) {
  if (!names.length || names.join() === about.models.join()) return;
  about.models = names;
  byId("chat").classList.toggle("one-model", names.length < 2);
  options.listModels(names);
}

function listen() {
  options.listen();
  attachments.listen();
  sidebar.listen({
    open, problem: tell, current: () => conversation.id,
    removed: (id) => { if (id === conversation.id) begin(); },
    renamed: (id, title) => { if (id === conversation.id) conversation.record.title = title; },
  });
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
    if (event.key === "ArrowUp" && !byId("prompt").value) editLast(event);
  });
  byId("prompt").addEventListener("input", () => sessionStorage.setItem(DRAFT, byId("prompt").value));
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", begin);
  byId("copy-curl").addEventListener("click", (event) => copySnippet(event.target, (body) => curl(pathOf(about), body)));
  byId("copy-python").addEventListener("click", (event) => copySnippet(event.target, python));
  document.addEventListener("lives", () => {
    const last = conversation.path().at(-1);
    if (last?.request && !running.has(last.id) && !views.get(last.id)?.link && lives.link(last.request)) show();
  });
  byId("messages").addEventListener("scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = byId("messages");
    isFollowing = scrollHeight - scrollTop - clientHeight < NEAR;
  });
}

// ---- conversations

/** Begins a new conversation. */
export function begin() {
  conversation = new Conversation();
  sessionStorage.removeItem(OPEN);
  attachments.take();
  show();
  sidebar.refresh();
  byId("prompt").focus();
}

async function open(id) {
  const active = [...running.values()].find((each) => each.conversation.id === id);
  if (active) conversation = active.conversation;
  else {
    const record = await store.get(id);
    if (!record) return;
    conversation = new Conversation(record, await store.messagesOf(id));
    views.clear();
    for (const [message, { view }] of running) views.set(message, view);
  }
  sessionStorage.setItem(OPEN, id);
  isFollowing = true;
  show();
  sidebar.refresh();
}

async function keep(of, ...messages) {
  try {
    await store.save(of.record, messages);
  } catch (error) {
    tell(t("This browser does not store conversations: {error}", { error: error.message }));
  }
}

function choose(message) {
  conversation.choose(message);
  keep(conversation);
  show();
}

// ---- requests

// The options, or null if they have an error, which is shown.
function readOptions() {
  try {
    return options.read(about);
  } catch (error) {
    tell(error.message);
    return null;
  }
}

function isBusy() { return [...running.values()].some((each) => each.conversation === conversation); }

function ask() {
  const text = byId("prompt").value;
  if (!(text.trim() || attachments.count()) || isBusy() || !about) return;
  if (!send(conversation.path().at(-1) ?? null, text, attachments.all())) return;
  byId("prompt").value = "";
  sessionStorage.removeItem(DRAFT);
  attachments.take();
}

// Sends a message after another one. Returns whether it could be sent.
function send(parent, text, files) {
  const read = readOptions();
  if (!read || isBusy()) return false;
  const message = conversation.add(parent, { role: "user", text, ...(files.length ? { attachments: files } : {}) });
  sessionStorage.setItem(OPEN, conversation.id);
  keep(conversation, message).then(sidebar.refresh);
  isFollowing = true;
  answer(message, read);
  return true;
}

// Lets the model answer a message, and a second model, too, if one is chosen.
function answer(parent, read = readOptions()) {
  if (!read || isBusy()) return;
  const other = options.otherModel(), path = conversation.path(parent), pair = other ? { pair: newId() } : {};
  const models = other ? [other, read.body.model] : [read.body.model]; // the last one is chosen
  const bodies = models.map((model) => requestBody(about, read, path, model));
  for (const body of bodies) run(conversation.add(parent, { role: "assistant", model: body.model, ...pair }), body);
  if (parent.role === "tool") keep(conversation, parent);
}

// Continues an answer that was stopped or cut off.
function proceed(message) {
  const read = readOptions();
  if (read && !isBusy()) run(message, requestBody(about, read, conversation.path(message), message.model));
}

async function run(message, body) {
  const of = conversation, reply = new Reply(message), stopper = new AbortController();
  const view = new AnswerView(message, actions);
  views.set(message.id, view);
  running.set(message.id, { conversation: of, stop: stopper, view });
  view.update();
  show();
  announce(t("The model is answering."));
  const timer = setInterval(() => keep(of, { ...message, reason: "stopped" }), KEPT);
  let failure = null;
  try {
    const stream = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await call(pathOf(about), stream, stopper.signal);
    message.route = response.headers.get("X-Quire-Route") ?? undefined;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      reply.take(event);
      view.update(reply.tokens);
    }
  } catch (error) {
    failure = error;
  }
  clearInterval(timer);
  reply.end(failure);
  speeds.note(message);
  running.delete(message.id);
  view.finish({ tokens: reply.tokens });
  if (of === conversation) show();
  announce(message.problem ?? t("The answer is complete."));
  await keep(of, message);
}

export function stop() {
  for (const each of running.values()) if (each.conversation === conversation) each.stop.abort();
}

// ---- what is shown

function show() {
  const path = conversation.path(), shown = [];
  path.forEach((message, i) => {
    if (message.role === "tool") return;
    const isLast = i === path.length - 1, partner = conversation.partner(message);
    const results = path[i + 1]?.role === "tool" ? path[i + 1].results : null;
    if (!partner) { shown.push(elementOf(message, { results, isLast })); return; }
    const pair = element("div", "pair"), both = [message, partner].sort((a, b) => b.order - a.order);
    pair.append(...both.map((each) => elementOf(each, { results: each === message ? results : null, isLast, isChosen: each === message })));
    shown.push(pair);
  });
  byId("messages").replaceChildren(...shown);
  sizes.disconnect();
  for (const each of shown) sizes.observe(each);
  byId("welcome").hidden = shown.length > 0;
  byId("stop").disabled = !isBusy();
  byId("send").disabled = isBusy();
  byId("stop").hidden = !isBusy();
  byId("send").hidden = isBusy();
  follow();
}

function elementOf(message, state) {
  let view = views.get(message.id);
  if (!view) {
    view = message.role === "user" ? new UserView(message, actions) : new AnswerView(message, actions);
    views.set(message.id, view);
  }
  if (message.role === "user") view.refresh();
  else if (!running.has(message.id)) view.finish(state);
  return view.element;
}

// Shows the end of the conversation, unless someone reads further up.
function follow() {
  if (isFollowing) byId("messages").scrollTop = byId("messages").scrollHeight;
}

function tell(message) {
  byId("messages").append(problem(message));
  isFollowing = true;
  follow();
}

function announce(text) { byId("announcement").textContent = text; }

function editLast(event) {
  const last = conversation.path().findLast(({ role }) => role === "user");
  if (!last) return;
  event.preventDefault();
  views.get(last.id).edit();
}

function copySnippet(place, make) {
  const text = byId("prompt").value.trim(), path = conversation.path(), files = attachments.all();
  const draft = { role: "user", text: text || "Hello!", attachments: files };
  const isNew = text || files.length || !path.length;
  const before = isNew ? [...path, draft] : path.slice(0, path.findLastIndex(({ role }) => role === "user") + 1);
  const read = readOptions();
  if (read) copy(place, () => make(requestBody(about, read, before)));
}
