// Chats with the model: streams answers, shows how likely each token was, and copies requests.

import { call, events } from "./api.js";
import * as pictures from "./pictures.js";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
  "repetition_penalty"];
const BOUNDS = [0.1, 0.3, 0.6, 0.9]; // of a token's probability, between the five colors
const SHOWN = 5; // alternatives of a token

let about = null;
let messages = [];
let running = null; // what stops the answer that is being written

export function start(server) {
  const isFirst = about === null;
  about = server;
  byId("options").elements.model.replaceChildren(...server.models.map((name) => new Option(name, name)));
  if (!server.generates) problem(byId("messages"), "This model makes embeddings or scores, and generates no text.");
  byId("attach").hidden = !(server.takes_pictures && server.has_chat_template);
  if (!isFirst) return;
  pictures.start((message) => problem(byId("messages"), message));
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    pictures.take();
    byId("messages").replaceChildren();
    byId("prompt").focus();
  });
  byId("copy-curl").addEventListener("click", (event) => copy(event.target, curl));
  byId("copy-python").addEventListener("click", (event) => copy(event.target, python));
}

// ---- the request

// The fields of the request that the options ask for. Throws an error that names a field that cannot be read.
function request(conversation) {
  const fields = byId("options").elements;
  const body = { model: fields.model.value };
  if (about.has_chat_template) {
    const system = fields.system.value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  } else {
    body.prompt = conversation.map((message) => message.content).join("");
  }
  for (const name of NUMBERS) if (fields[name].value !== "") body[name] = Number(fields[name].value);
  if (fields.stop.value) body.stop = [fields.stop.value];
  const schema = json(fields.schema.value, "The JSON schema");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json(fields.tools.value, "The list of tools");
  if (tools && about.has_chat_template) body.tools = tools;
  if (fields.logprobs.checked) {
    if (about.has_chat_template) Object.assign(body, { logprobs: true, top_logprobs: SHOWN });
    else body.logprobs = SHOWN;
  }
  return { ...body, ...json(fields.more.value, "The object of further fields") };
}

function json(text, what) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

function path() { return about.has_chat_template ? "v1/chat/completions" : "v1/completions"; }

async function ask() {
  const text = byId("prompt").value;
  if (!(text.trim() || pictures.count()) || running || !about) return;
  const conversation = [...messages, { role: "user", content: pictures.content(text) }];
  let body;
  try {
    body = { ...request(conversation), stream: true, stream_options: { include_usage: true } };
  } catch (error) {
    problem(byId("messages"), error.message);
    return;
  }
  byId("prompt").value = "";
  const said = bubble("user");
  said.querySelector(".text").textContent = text;
  const seen = Object.assign(document.createElement("div"), { className: "pictures" });
  seen.append(...pictures.take().map(pictures.thumbnail));
  if (seen.hasChildNodes()) said.prepend(seen);
  messages = conversation;
  const answer = new Answer(bubble("assistant"));
  running = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  try {
    for await (const event of events(await call(path(), body, running.signal))) {
      if (event.error) throw new Error(event.error.message);
      answer.take(event);
    }
  } catch (error) {
    if (error.name === "AbortError") answer.reason = "stopped";
    else problem(answer.element, error.message);
  }
  running = null;
  byId("stop").disabled = true;
  byId("send").disabled = false;
  answer.end();
  if (answer.text || answer.calls.length) {
    const calls = answer.calls.length ? { tool_calls: answer.calls } : {};
    messages = [...messages, { role: "assistant", content: answer.text, ...calls }];
  } else {
    messages = messages.slice(0, -1);
  }
}

// ---- what is shown

function bubble(role) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const text = document.createElement("div");
  text.className = "text";
  element.append(text);
  byId("messages").append(element);
  follow(role === "user");
  return element;
}

// Shows the end of the conversation, unless someone reads further up. The form covers what is below it, and on narrow
// screens the options are below the form.
function follow(always = false) {
  const hidden = byId("messages").getBoundingClientRect().bottom - byId("ask").getBoundingClientRect().top;
  if (hidden > 0 && (always || hidden < 300)) window.scrollBy(0, hidden);
}

function problem(where, message) {
  const element = document.createElement("p");
  element.className = "notice problem";
  element.setAttribute("role", "alert");
  element.textContent = message;
  where.append(element);
  follow();
}

class Answer {
  constructor(element) {
    this.element = element;
    this.place = element.querySelector(".text");
    this.text = "";
    this.calls = [];
    this.tokens = [];
    this.began = performance.now();
    this.first = this.last = null;
    this.usage = this.reason = this.thoughts = null;
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning_content ?? delta.reasoning;
    const tokens = likelihoods(choice.logprobs);
    if (delta.content || thought || delta.tool_calls || tokens.length) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    if (thought) this.think(thought);
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (delta.content) this.text += delta.content;
    if (tokens.length && !thought && !delta.tool_calls) for (const token of tokens) this.show(token);
    else if (delta.content && !tokens.length) this.place.append(delta.content);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    follow();
  }

  think(text) {
    if (!this.thoughts) {
      const details = document.createElement("details");
      details.append(Object.assign(document.createElement("summary"), { textContent: "Thinking" }));
      this.thoughts = document.createElement("div");
      this.thoughts.className = "text";
      details.append(this.thoughts);
      this.element.prepend(details);
    }
    this.thoughts.append(text);
  }

  call(part) {
    const known = this.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } };
    known.function.name += part.function?.name ?? "";
    known.function.arguments += part.function?.arguments ?? "";
  }

  // A token, colored by its probability. The arrow keys go from one to the next.
  show(token) {
    const element = document.createElement("span");
    const likely = Math.exp(token.logprob);
    element.className = `token p${BOUNDS.filter((bound) => likely >= bound).length}`;
    element.textContent = token.token;
    const index = this.tokens.push({ ...token, element }) - 1;
    element.addEventListener("click", () => this.open(index));
    this.place.append(element);
  }

  open(index) {
    const token = this.tokens[index];
    if (!token) return;
    this.tokens[this.opened]?.element.removeAttribute("aria-current");
    this.opened = index;
    token.element.setAttribute("aria-current", "true");
    const table = document.createElement("table");
    table.className = "choices";
    const rows = token.top.some((other) => other.token === token.token) ? token.top : [...token.top, token];
    table.innerHTML = "<caption></caption><thead><tr><th scope=col>Token</th><th scope=col>Probability</th></tr></thead><tbody></tbody>";
    table.caption.textContent = `Token ${index + 1} of ${this.tokens.length}, and what else the model considered`;
    for (const other of rows) {
      const row = table.tBodies[0].insertRow();
      row.className = other.token === token.token ? "chosen" : "";
      const code = document.createElement("code");
      code.textContent = other.token.replaceAll("\n", "⏎") || "∅";
      row.insertCell().append(code);
      row.insertCell().textContent = percent(Math.exp(other.logprob));
    }
    this.element.querySelector(".choices")?.remove();
    this.place.after(table);
  }

  // The token that ends an answer is no part of its text.
  trim() {
    const last = this.tokens.at(-1)?.element;
    if (last && this.place.textContent === this.text + last.textContent) {
      last.remove();
      this.tokens.pop();
    }
  }

  end() {
    this.trim();
    for (const call of this.calls) {
      const code = document.createElement("pre");
      code.className = "text";
      code.textContent = `${call.function.name}(${call.function.arguments})`;
      this.place.after(code);
    }
    if (this.tokens.length) {
      this.place.tabIndex = 0;
      this.place.setAttribute("role", "group");
      this.place.setAttribute("aria-label", "Tokens of the answer; the arrow keys show what else was considered");
      this.place.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        this.open(Math.max(0, Math.min(this.tokens.length - 1, (this.opened ?? -step) + step)));
      });
    }
    const facts = document.createElement("p");
    facts.className = "facts";
    facts.textContent = this.facts().join(" · ");
    if (facts.textContent) this.element.append(facts);
    follow();
  }

  facts() {
    const facts = [];
    if (this.first !== null) facts.push(`first token after ${seconds(this.first - this.began)}`);
    const count = this.usage?.completion_tokens ?? this.tokens.length;
    if (count > 1 && this.last > this.first) {
      facts.push(`${(1000 * (count - 1) / (this.last - this.first)).toFixed(1)} tokens a second`);
    }
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      facts.push(`${this.usage.prompt_tokens} tokens of prompt${cached ? `, ${cached} of them cached` : ""}, ${count} of answer`);
    }
    const reasons = { length: "cut off by the limit of tokens", stopped: "stopped", tool_calls: "calls tools",
      repetition: "ended because it repeated itself" };
    if (reasons[this.reason]) facts.push(reasons[this.reason]);
    return facts;
  }
}

// Of a chat or of a completion: { token, logprob, top: [{ token, logprob }] }.
function likelihoods(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top ?? [] }));
  }
  return (logprobs.tokens ?? []).map((token, i) => ({
    token, logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([name, logprob]) => ({ token: name, logprob })),
  }));
}

function percent(share) { return share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`; }
function seconds(ms) { return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`; }

// ---- the request, to be sent by others

function url() { return new URL(path(), document.baseURI).href; }

function pending() {
  const text = byId("prompt").value.trim();
  const content = pictures.content(text);
  const conversation = content.length ? [...messages, { role: "user", content }] : messages.slice(0, -1);
  return request(conversation.length ? conversation : [{ role: "user", content: "Hello!" }]);
}

function curl() {
  const body = JSON.stringify(pending(), null, 2).replaceAll("'", "'\\''");
  return `curl ${url()} \\\n  -H 'Content-Type: application/json' \\\n  -H 'Authorization: Bearer KEY' \\\n  -d '${body}'\n`;
}

function python() {
  const body = pending();
  const known = ["model", "messages", "prompt", "temperature", "max_tokens", "top_p", "seed", "presence_penalty",
    "frequency_penalty", "stop", "response_format", "tools", "logprobs", "top_logprobs"];
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.includes(name)));
  const lines = Object.entries(body).filter(([name]) => known.includes(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  const create = about.has_chat_template ? "chat.completions" : "completions";
  const text = about.has_chat_template ? "message.content" : "text";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${new URL("v1", document.baseURI).href}", api_key="KEY")\n`
    + `answer = client.${create}.create(\n${lines.join("\n")}\n)\nprint(answer.choices[0].${text})\n`;
}

function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

async function copy(button, make) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(make());
    button.textContent = "Copied";
  } catch (error) {
    button.textContent = "Not copied";
    problem(byId("messages"), error.message);
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
