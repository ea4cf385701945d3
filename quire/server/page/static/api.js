// Requests to the server, with the API key if there is one, and streams of server-sent events.

const KEY = "quire-api-key";
let onRefused = () => {};

export function askForKey(callback) { onRefused = callback; }
export function setKey(key) { sessionStorage.setItem(KEY, key); }
export function hasKey() { return Boolean(sessionStorage.getItem(KEY)); }

export async function call(path, body, signal) {
  const headers = {};
  if (hasKey()) headers.Authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.status === 401) onRefused();
  if (!response.ok) throw new Error(await problem(response));
  return response;
}

async function problem(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.param && !error.message.includes(error.param) ? `${error.message} (${error.param})` : error.message;
  } catch {
    return text || `The server answered with status ${response.status}.`;
  }
}

/** The objects of a stream of lines, until it ends. */
export async function* lines(response) {
  for await (const part of parts(response, "\n")) if (part.trim()) yield JSON.parse(part);
}

/** The objects of a stream of server-sent events, until it ends. */
export async function* events(response) {
  for await (const part of parts(response, "\n\n")) {
    const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
    if (data === "[DONE]") return;
    if (data) yield JSON.parse(data);
  }
}

async function* parts(response, end) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      if (rest) yield rest;
      return;
    }
    const found = (rest + value).split(end);
    rest = found.pop();
    yield* found;
  }
}
