// A conversation: a tree of messages. Each has the messages that can follow it as its branches, of which one is chosen.

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string} conversation
 * @property {string | null} parent the message before it
 * @property {number} order the later of two branches has the higher one
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} text
 * @property {object[]} [attachments] of a user's message: { kind: "image" | "audio" | "text", name, url?, text? }
 * @property {{ id: string, text: string }[]} [results] of a tool's message, for each call
 * @property {string} [model] that gave the answer
 * @property {string} [thinking]
 * @property {number} [thinkingMs]
 * @property {{ id: string, name: string, arguments: string }[]} [calls]
 * @property {object} [figures] of an answer
 * @property {string} [route] how a semantic router chose the model
 * @property {string} [reason] why the answer ended
 * @property {string} [problem]
 * @property {string} [pair] the same in two answers that are compared
 */

const ROOT = "";
const TITLE = 60; // characters

export function newId() { return Date.now().toString(36) + Math.random().toString(36).slice(2, 10); }

export class Conversation {
  /** @param {object} record as it is stored @param {Message[]} messages */
  constructor(record = {}, messages = []) {
    const now = Date.now();
    this.record = { id: newId(), title: "", created: now, changed: now, chosen: {}, ...record };
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.branches = new Map();
    for (const message of [...messages].sort((a, b) => a.order - b.order)) this.link(message);
  }

  get id() { return this.record.id; }
  get isEmpty() { return this.messages.size === 0; }

  link(message) {
    const key = message.parent ?? ROOT;
    this.branches.set(key, [...this.branches.get(key) ?? [], message]);
  }

  /** Adds a message after another one, and chooses it. @returns {Message} */
  add(parent, fields) {
    const message = {
      id: newId(), conversation: this.id, parent: parent?.id ?? null, order: this.messages.size, text: "", ...fields,
    };
    this.messages.set(message.id, message);
    this.link(message);
    this.choose(message);
    this.record.changed = Date.now();
    if (!this.record.title && message.role === "user") this.record.title = titleOf(message);
    return message;
  }

  choose(message) { this.record.chosen[message.parent ?? ROOT] = message.id; }

  /** The messages that could be in the place of a message, itself included. Compared answers count as one. */
  alternatives(message) {
    const found = new Map();
    for (const each of this.branches.get(message.parent ?? ROOT)) {
      const key = each.pair ?? each.id;
      if (!found.has(key) || each === message) found.set(key, each);
    }
    return [...found.values()];
  }

  /** The other answer of a comparison. */
  partner(message) {
    if (!message.pair) return null;
    return this.branches.get(message.parent ?? ROOT).find((each) => each.pair === message.pair && each !== message) ?? null;
  }

  parentOf(message) { return message.parent === null ? null : this.messages.get(message.parent); }

  /** The chosen messages, up to `last` if it is given. @returns {Message[]} */
  path(last) {
    if (last !== undefined) {
      const before = [];
      for (let message = last; message; message = this.parentOf(message)) before.unshift(message);
      return before;
    }
    const found = [];
    for (let key = ROOT; ;) {
      const choices = this.branches.get(key);
      if (!choices?.length) return found;
      const message = choices.find((each) => each.id === this.record.chosen[key]) ?? choices.at(-1);
      found.push(message);
      key = message.id;
    }
  }
}

function titleOf({ text, attachments }) {
  const line = text.trim().split("\n")[0] || attachments?.[0]?.name || "";
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}
