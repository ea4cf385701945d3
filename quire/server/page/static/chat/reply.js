// Collects the events of a streamed answer in its message, and measures it.

const SHORTEST = 50; // milliseconds of a stream whose speed is measured
const REASONS = new Set(["length", "stopped", "tool_calls", "repetition"]);

export class Reply {
  /** @param {import("./conversation.js").Message} message may have a text already, which is continued */
  constructor(message) {
    this.message = message;
    this.tokens = []; // with their likelihoods, if they were asked for
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.thinkingBegan = null;
    message.calls ??= [];
    delete message.reason;
    delete message.problem;
  }

  take(event) {
    if (event.id) this.message.request = event.id;
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning_content ?? delta.reasoning, tokens = likelihoods(choice.logprobs);
    if (delta.content || thought || delta.tool_calls || tokens.length) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    if (thought) this.think(thought);
    else if (delta.content || delta.tool_calls) this.stopThinking();
    for (const part of delta.tool_calls ?? []) this.call(part);
    if (delta.content) this.message.text += delta.content;
    if (!thought && !delta.tool_calls) this.tokens.push(...tokens);
    if (choice.finish_reason) this.message.reason = choice.finish_reason;
  }

  think(text) {
    this.thinkingBegan ??= performance.now();
    this.message.thinking = (this.message.thinking ?? "") + text;
    this.message.thinkingMs = performance.now() - this.thinkingBegan;
  }

  stopThinking() {
    if (this.thinkingBegan === null) return;
    this.message.thinkingMs = performance.now() - this.thinkingBegan;
    this.thinkingBegan = null;
  }

  call({ index, id, function: part }) {
    const known = this.message.calls[index] ??= { id, name: "", arguments: "" };
    known.name += part?.name ?? "";
    known.arguments += part?.arguments ?? "";
  }

  /** error: what ended the stream, if not its end. */
  end(error) {
    const { message } = this;
    this.stopThinking();
    if (error?.name === "AbortError") message.reason = "stopped";
    else if (error) message.problem = error.message;
    if (!REASONS.has(message.reason)) delete message.reason;
    // Tokens of calls are no text, and neither is the token that ends an answer.
    if (message.calls.length) this.tokens = [];
    const texts = this.tokens.map(({ token }) => token).join("");
    if (this.tokens.length && texts === message.text + this.tokens.at(-1).token) this.tokens.pop();
    message.figures = this.figures();
  }

  figures() {
    const figures = {}, { usage } = this, count = usage?.completion_tokens ?? this.tokens.length;
    if (this.first !== null) figures.first = this.first - this.began;
    if (count > 1 && this.last - this.first > SHORTEST) figures.rate = 1000 * (count - 1) / (this.last - this.first);
    if (usage) {
      figures.prompt = usage.prompt_tokens;
      figures.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      figures.output = count;
      const joules = usage.energy_joules ?? usage.energy?.joules;
      if (joules) figures.joules = joules;
    }
    return figures;
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
