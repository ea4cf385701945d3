// The npm package `@anthropic-ai/sdk`.

import Anthropic from '@anthropic-ai/sdk'
import { answer, collect, host, PLACE, question, tell, WEATHER } from './question.mjs'

const client = new Anthropic({ baseURL: host, apiKey: question.key, maxRetries: 0 })
const { model, prompt } = question
const messages = [{ role: 'user', content: prompt }]
const options = { model, max_tokens: question.tokens, temperature: 0 }
const tool = { name: WEATHER.name, description: WEATHER.description, input_schema: WEATHER.parameters }
const tools = { ...options, max_tokens: 120, tools: [tool] }
const turns = [{ role: 'user', content: question.weather }]

const calls = ({ content }) => content.filter((block) => block.type === 'tool_use').map((block) => [block.name, block.input])
const usage = ({ usage: counts }) => [counts.input_tokens + (counts.cache_read_input_tokens ?? 0), counts.output_tokens]

const whole = await client.messages.create({ ...options, messages })
const stream = client.messages.stream({ ...options, messages })
const texts = []
stream.on('text', (text) => texts.push(text))
const streamed = await stream.finalMessage()
const called = await client.messages.create({ ...tools, messages: turns })
const result = { type: 'tool_result', tool_use_id: called.content[0].id, content: question.sky }
const told = [...turns, { role: 'assistant', content: called.content }, { role: 'user', content: [result] }]
const format = { type: 'json_schema', schema: PLACE }
const placed = await client.messages.create({ ...options, messages, output_config: { format } })

tell({
  chat: whole.content[0].text,
  'chat/stream': texts.join(''),
  'chat usage': usage(whole),
  'chat usage/stream': usage(streamed),
  tools: calls(called),
  'tools/stream': calls(await client.messages.stream({ ...tools, messages: turns }).finalMessage()),
  result: (await client.messages.create({ ...tools, messages: told })).content[0].text,
  structured: JSON.parse(placed.content[0].text).city,
  models: (await collect(client.models.list())).map((found) => found.id),
  'unknown model': await answer(() => client.messages.create({ ...options, messages, model: 'no' })),
  'long prompt': await answer(() => client.messages.create({
    ...options, messages: [{ role: 'user', content: question.long_prompt }],
  })),
})
