// The requests of a conversation.

/** The messages of a path, as the API wants them. Those that the server refused are left out. */
export function apiMessages(path) {
  const found = [];
  for (const message of path) {
    if (message.role === "user") found.push({ role: "user", content: contentOf(message) });
    else if (message.role === "tool") {
      for (const { id, text } of message.results) found.push({ role: "tool", tool_call_id: id, content: text });
    } else if (message.text || message.calls?.length) found.push(answerOf(message));
    else while (found.length && found.at(-1).role !== "assistant") found.pop();
  }
  return found;
}

function answerOf({ text, calls }) {
  if (!calls?.length) return { role: "assistant", content: text };
  const functions = calls.map(({ id, name, arguments: values }) => ({ id, type: "function", function: { name, arguments: values } }));
  return { role: "assistant", content: text || null, tool_calls: functions };
}

/** The content of a user's message: a text, or its parts. */
function contentOf({ text, attachments = [] }) {
  if (!attachments.length) return text;
  const texts = attachments.filter(({ kind }) => kind === "text");
  const whole = [...texts.map((file) => `${file.name}:\n\n\`\`\`\`\n${file.text}\n\`\`\`\``), text].filter((each) => each.trim()).join("\n\n");
  const media = attachments.filter(({ kind }) => kind !== "text").map(mediaPart);
  return media.length ? [...media, ...(whole ? [{ type: "text", text: whole }] : [])] : whole;
}

function mediaPart({ kind, name, url }) {
  if (kind === "image") return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format: name.split(".").at(-1).toLowerCase() } };
}

/**
 * @param {object} about the server
 * @param {object} options as options.read() returns them
 * @param {object[]} path the messages before the answer; or up to an answer, which is continued
 */
export function requestBody(about, { system, body, more }, path, model = body.model) {
  const messages = apiMessages(path);
  if (!about.has_chat_template) {
    return { ...body, model, prompt: messages.map(({ content }) => content).join(""), ...more };
  }
  if (system) messages.unshift({ role: "system", content: system });
  const isContinued = path.at(-1)?.role === "assistant";
  const continued = isContinued ? { continue_final_message: true, add_generation_prompt: false } : {};
  return { ...body, model, messages, ...continued, ...more };
}

export function pathOf(about) { return about.has_chat_template ? "v1/chat/completions" : "v1/completions"; }
