// Every method of the npm package `ollama`. ask_ollama.py does the same in Python.

import { readFileSync } from 'node:fs'
import { Ollama } from 'ollama'

const question = JSON.parse(readFileSync(0))
const headers = { 'x-api-key': question.key }
const [client, embedder] = ['url', 'embedder'].map((name) => new Ollama({ host: question[name], headers }))
const { model, pulled } = question
const options = { temperature: 0, num_predict: 24 }
const chat = { model: `${model}:latest`, messages: [{ role: 'user', content: question.prompt }], options, keep_alive: '5m' }
const generation = { model, prompt: question.prompt, options }
const city = { type: 'string', description: 'its name' }
const parameters = { type: 'object', properties: { city }, required: ['city'] }
const tool = { type: 'function', function: { name: 'get_weather', description: 'Get the weather of a city.', parameters } }
const weather = {
  model, messages: [{ role: 'user', content: question.weather }], tools: [tool],
  options: { temperature: 0, num_predict: 120 },
}

const all = async (stream) => { const parts = []; for await (const part of await stream) parts.push(part); return parts }
const failure = async (ask) => {
  try {
    return [0, `no error: ${JSON.stringify(await ask())}`]
  } catch (error) {
    return [error.status_code ?? -1, error.error ?? error.message]
  }
}

const whole = await client.chat({ ...chat, logprobs: true, top_logprobs: 2 })
const generated = await client.generate(generation)
const later = await client.generate({ ...generation, prompt: 'And then?', context: generated.context })
const called = (await client.chat(weather)).message
const streamed = (await all(client.chat({ ...weather, stream: true }))).flatMap((part) => part.message.tool_calls ?? [])
const told = { role: 'tool', tool_name: 'get_weather', content: question.told }
const answered = await client.chat({ ...weather, messages: [...weather.messages, called, told] })
const shown = await client.show({ model })

const created = [
  (await client.create({ model: 'brief', from: model, system: 'Be brief.', parameters: { num_predict: 5 } })).status,
  (await all(client.create({ model: 'uploaded', from: 'brief', stream: true }))).at(-1).status,
  (await client.copy({ source: 'brief', destination: 'copied' })).status,
]
const listed = (await client.list()).models.map((entry) => entry.model)
const brief = await client.chat({ ...chat, model: 'copied', options: { temperature: 0 } })
const deleted = []
for (const name of ['brief', 'copied', 'uploaded']) deleted.push((await client.delete({ model: name })).status)
const progress = await all(client.pull({ model: pulled, stream: true }))
const downloaded = progress.filter((part) => part.digest)
const again = (await client.pull({ model: pulled })).status
deleted.push((await client.delete({ model: pulled })).status)
const vectors = await embedder.embed({ model: 'all-minilm', input: question.texts, truncate: true, dimensions: 8 })
const unloaded = await client.generate({ model, prompt: '', keep_alive: 0 })
const none = (await client.ps()).models
const loaded = await client.chat({ model, messages: [] })

console.log(JSON.stringify({
  version: (await client.version()).version,
  texts: [
    whole.message.content, generated.response,
    (await all(client.chat({ ...chat, stream: true }))).map((part) => part.message.content).join(''),
    (await all(client.generate({ ...generation, stream: true }))).map((part) => part.response).join(''),
  ],
  logprobs: [whole.logprobs.length, whole.logprobs[0].top_logprobs.length],
  end: [whole.done, whole.done_reason, whole.eval_count],
  context: later.prompt_eval_count > generated.context.length,
  formatted: JSON.parse((await client.chat({ ...chat, format: question.schema })).message.content),
  called: [...called.tool_calls, ...streamed].map((call) => [call.function.name, call.function.arguments]),
  told: answered.message.content,
  shown: [shown.details.family, shown.details.parameter_size, shown.model_info['general.parameter_count']],
  capabilities: shown.capabilities,
  created, listed, brief: [brief.message.content, brief.eval_count], deleted,
  pulled: [progress[0].status, Math.max(...downloaded.map((part) => part.total)),
    Math.max(...downloaded.map((part) => part.completed)), progress.at(-1).status, again],
  embeddings: vectors.embeddings, 'embedding tokens': vectors.prompt_eval_count,
  embedding: (await embedder.embeddings({ model: 'all-minilm', prompt: question.texts[0] })).embedding,
  residence: [unloaded.done_reason, none.length, loaded.done_reason, (await client.ps()).models[0].model],
  'unknown model': await failure(() => client.chat({ ...chat, model: 'no' })),
  'unknown model/pull': await failure(() => client.pull({ model: 'no/such' })),
  'unknown model/pull stream': await failure(() => all(client.pull({ model: 'no/such', stream: true }))),
  'no embeddings': await failure(() => client.embed({ model, input: 'a' })),
  push: await failure(() => client.push({ model })),
}))
