// Conversations as files: JSON with all branches, and Markdown with the chosen one.

import { Conversation, newId } from "./conversation.js";

const FORMAT = "quire-conversations";
const ROLES = new Set(["user", "assistant", "tool"]);
const MARK = /^<!-- quire (user|assistant|tool) -->\n(?:## .*\n\n)?/gm;

/** @param {Conversation[]} conversations */
export function toJson(conversations) {
  const content = conversations.map(({ record, messages }) => ({ ...record, messages: [...messages.values()] }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: content }, null, 1);
}

/** @param {Conversation} conversation */
export function toMarkdown(conversation) {
  const parts = conversation.path().map((message) => {
    const title = { user: "You", assistant: message.model ?? "Answer", tool: "Results of tools" }[message.role];
    return `<!-- quire ${message.role} -->\n## ${title}\n\n${textOf(message)}\n`;
  });
  return `# ${conversation.record.title}\n\n${parts.join("\n")}`;
}

function textOf({ text, calls = [], results = [], attachments = [] }) {
  return [
    ...attachments.map((file) => (file.text === undefined ? `*${file.name}*` : `*${file.name}*\n\n\`\`\`\`\n${file.text}\n\`\`\`\``)),
    ...(text ? [text] : []),
    ...calls.map((call) => `\`\`\`json\n${JSON.stringify({ name: call.name, arguments: call.arguments })}\n\`\`\``),
    ...results.map((result) => `\`\`\`\n${result.text}\n\`\`\``),
  ].join("\n\n");
}

/** Reads a file of either kind. Its conversations get new ids. Throws an error if it is neither. @returns {Conversation[]} */
export function fromFile(name, text) {
  const found = text.trimStart().startsWith("{") ? fromJson(JSON.parse(text)) : fromMarkdown(name, text);
  if (!found.length) throw new Error(`${name} has no conversations`);
  return found;
}

function fromJson(content) {
  if (content.format !== FORMAT || content.version !== 1) throw new Error(`"format" is not "${FORMAT}", version 1`);
  return content.conversations.map(({ messages, ...record }) => {
    const ids = new Map(messages.map(({ id }) => [id, newId()])), id = newId();
    const renamed = messages.map((message, order) => {
      if (!ROLES.has(message.role) || typeof message.text !== "string") throw new Error(`Message ${order + 1} has no valid role and text`);
      const parent = message.parent === null ? null : ids.get(message.parent);
      if (parent === undefined) throw new Error(`Message ${order + 1} follows none`);
      return { ...message, id: ids.get(message.id), conversation: id, parent, order };
    });
    const chosen = Object.fromEntries(Object.entries(record.chosen ?? {}).map(([from, to]) => [ids.get(from) ?? "", ids.get(to)]));
    const made = { id, title: String(record.title ?? ""), created: Number(record.created) || Date.now(), chosen };
    return new Conversation({ ...made, changed: Number(record.changed) || made.created }, renamed);
  });
}

function fromMarkdown(name, text) {
  const marks = [...text.matchAll(MARK)];
  if (!marks.length) return [];
  const title = /^# (.+)$/m.exec(text.slice(0, marks[0].index))?.[1] ?? name;
  const conversation = new Conversation({ title });
  let last = null;
  marks.forEach((mark, i) => {
    const content = text.slice(mark.index + mark[0].length, marks[i + 1]?.index).trim();
    const role = mark[1] === "tool" ? "user" : mark[1]; // the calls are text now, and so are their results
    last = conversation.add(last, { role, text: content });
  });
  return [conversation];
}
