// The npm package `openai`: chats, completions and responses.

import OpenAI from 'openai'
import { answer, collect, PLACE, question, tell, WEATHER } from './question.mjs'

const client = new OpenAI({ baseURL: question.url, apiKey: question.key, maxRetries: 0 })
const { model, prompt } = question
const messages = [{ role: 'user', content: prompt }]
const options = { model, max_tokens: question.tokens, temperature: 0 }
const tools = { ...options, max_tokens: 120, tools: [{ type: 'function', function: WEATHER }] }
const turns = [{ role: 'user', content: question.weather }]

const calls = ({ choices: [{ message }] }) =>
  message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)])
const usage = (found) => [found.usage.prompt_tokens, found.usage.completion_tokens]

const whole = await client.chat.completions.create({ ...options, messages })
const streaming = { stream: true, stream_options: { include_usage: true } }
const chunks = await collect(client.chat.completions.create({ ...options, messages, ...streaming }))
const called = await client.chat.completions.create({ ...tools, messages: turns })
const streamed = await client.chat.completions.stream({ ...tools, messages: turns }).finalChatCompletion()
const [call] = called.choices[0].message.tool_calls
const result = { role: 'tool', tool_call_id: call.id, content: question.sky }
const told = await client.chat.completions.create({ ...tools, messages: [...turns, called.choices[0].message, result] })
const run = client.chat.completions.runTools({
  ...tools, messages: turns, tools: [{
    type: 'function', function: { ...WEATHER, function: () => question.sky, parse: JSON.parse },
  }],
})
const json_schema = { name: 'place', schema: PLACE, strict: true }
const placed = await client.chat.completions.parse({ ...options, messages, response_format: { type: 'json_schema', json_schema } })

const short = { model, max_output_tokens: question.tokens, temperature: 0, input: prompt }
const long = { ...short, max_output_tokens: 120, tools: [{ type: 'function', ...WEATHER }], input: question.weather }
const callsOf = ({ output }) => output.filter((item) => item.type === 'function_call')
  .map((item) => [item.name, JSON.parse(item.arguments)])
const response = await client.responses.create(short)
const events = await collect(client.responses.create({ ...short, stream: true }))
const responded = await client.responses.create(long)
const output = { type: 'function_call_output', call_id: responded.output[0].call_id, output: question.sky }
const items = [{ role: 'user', content: question.weather }, ...responded.output, output]
const format = { type: 'json_schema', name: 'place', schema: PLACE, strict: true }

tell({
  chat: whole.choices[0].message.content,
  'chat/stream': chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join(''),
  'chat/responses': response.output_text,
  'chat/responses stream': events.map((event) => event.type === 'response.output_text.delta' ? event.delta : '').join(''),
  completion: (await client.completions.create({ ...options, prompt })).choices[0].text,
  'completion/stream': (await collect(client.completions.create({ ...options, prompt, stream: true })))
    .map((chunk) => chunk.choices[0].text).join(''),
  'chat usage': usage(whole),
  'chat usage/stream': usage(chunks.at(-1)),
  tools: calls(called),
  'tools/stream': calls(streamed),
  'tools/responses': callsOf(responded),
  'tools/responses stream': callsOf(await client.responses.stream(long).finalResponse()),
  result: told.choices[0].message.content,
  'result/run': await run.finalContent(),
  'result/responses': (await client.responses.create({ ...long, input: items })).output_text,
  structured: placed.choices[0].message.parsed.city,
  'structured/responses': (await client.responses.parse({ ...short, text: { format } })).output_parsed.city,
  models: (await collect(client.models.list())).map((found) => found.id),
  'unknown model': await answer(() => client.chat.completions.create({ ...options, messages, model: 'no' })),
  'long prompt': await answer(() => client.completions.create({ ...options, prompt: question.long_prompt })),
})
