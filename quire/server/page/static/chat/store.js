// Conversations in the browser's IndexedDB. They never leave the browser, except as requests to the model.

const NAME = "quire";
const STORES = ["conversations", "messages"];
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

const resultOf = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function transaction(mode, work) {
  const change = (await open()).transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    change.oncomplete = resolve;
    change.onabort = change.onerror = () => reject(change.error);
  });
  const result = await work(...STORES.map((name) => change.objectStore(name)));
  await ended;
  return result;
}

/** @returns {Promise<object[]>} all conversations without their messages, the latest first */
export async function list() {
  const found = await transaction("readonly", (conversations) => resultOf(conversations.getAll()));
  return found.sort((a, b) => b.changed - a.changed);
}

/** @returns {Promise<object | undefined>} a conversation without its messages */
export function get(id) { return transaction("readonly", (conversations) => resultOf(conversations.get(id))); }

/** @returns {Promise<object[]>} the messages of a conversation */
export function messagesOf(id) {
  return transaction("readonly", (_, messages) => resultOf(messages.index("conversation").getAll(id)));
}

/** Stores a conversation, and some of its messages. */
export function save(conversation, changed = []) {
  return transaction("readwrite", (conversations, messages) => {
    conversations.put(conversation);
    for (const message of changed) messages.put(message);
  });
}

export function remove(id) {
  return transaction("readwrite", async (conversations, messages) => {
    conversations.delete(id);
    for (const key of await resultOf(messages.index("conversation").getAllKeys(id))) messages.delete(key);
  });
}

/** @returns {Promise<Set<string>>} the ids of the conversations in whose messages a text occurs */
export function search(text) {
  const wanted = text.toLowerCase();
  return transaction("readonly", (_, messages) => new Promise((resolve, reject) => {
    const found = new Set(), request = messages.openCursor();
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) { resolve(found); return; }
      if (cursor.value.text.toLowerCase().includes(wanted)) found.add(cursor.value.conversation);
      cursor.continue();
    };
  }));
}
