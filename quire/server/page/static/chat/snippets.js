// Requests as code, to be sent by others.

const KNOWN = ["model", "messages", "prompt", "temperature", "max_tokens", "top_p", "seed", "presence_penalty",
  "frequency_penalty", "stop", "response_format", "tools", "tool_choice", "logprobs", "top_logprobs"];

export function curl(path, body) {
  const url = new URL(path, document.baseURI).href, text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -H 'Authorization: Bearer KEY' \\\n  -d '${text}'\n`;
}

/** Code for the client openai. */
export function python(body) {
  const isChat = "messages" in body;
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.includes(name)));
  const lines = Object.entries(body).filter(([name]) => KNOWN.includes(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  const create = isChat ? "chat.completions" : "completions", text = isChat ? "message.content" : "text";
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
