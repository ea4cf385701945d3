// Vercel's AI SDK, with its providers for servers like OpenAI's, for OpenAI's responses, and for Anthropic's API.

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from 'ai'
import { answer, collect, PARAMETERS, PLACE, question, tell } from './question.mjs'

globalThis.AI_SDK_LOG_WARNINGS = false
const { url: baseURL, key: apiKey, prompt } = question
const compatible = createOpenAICompatible({ name: 'quire', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })
const providers = {
  compatible, responses: createOpenAI({ baseURL, apiKey }), anthropic: createAnthropic({ baseURL: question.url, apiKey }),
}
const short = { temperature: 0, maxOutputTokens: question.tokens, maxRetries: 0 }
const getWeather = tool({
  description: 'Get the weather of a city.', inputSchema: jsonSchema(PARAMETERS), execute: () => question.sky,
})
const long = { ...short, maxOutputTokens: 120, tools: { get_weather: getWeather }, stopWhen: stepCountIs(2), prompt: question.weather }

const calls = (steps) => steps.flatMap((step) => step.toolCalls).map((call) => [call.toolName, call.input])
const usage = (counts) => [counts.inputTokens, counts.outputTokens]

const answers = {}
for (const [name, provider] of Object.entries(providers)) {
  const model = provider(question.model)
  const whole = await generateText({ ...short, model, prompt })
  const stream = streamText({ ...short, model, prompt })
  answers[`chat/${name}`] = whole.text
  answers[`chat/${name} stream`] = (await collect(stream.textStream)).join('')
  answers[`chat usage/${name}`] = usage(whole.usage)
  answers[`chat usage/${name} stream`] = usage(await stream.usage)
  const called = await generateText({ ...long, model })
  answers[`tools/${name}`] = calls(called.steps)
  answers[`result/${name}`] = called.text
  const calledInAStream = streamText({ ...long, model })
  answers[`tools/${name} stream`] = calls(await calledInAStream.steps)
  answers[`result/${name} stream`] = await calledInAStream.text
  const schema = jsonSchema(PLACE)
  answers[`structured/${name}`] = (await generateObject({ ...short, maxOutputTokens: 100, model, prompt, schema })).object.city
  const objects = streamObject({ ...short, maxOutputTokens: 100, model, prompt, schema })
  answers[`structured/${name} stream`] = (await collect(objects.partialObjectStream)).at(-1).city
  answers[`unknown model/${name}`] = await answer(() => generateText({ ...short, model: provider('no'), prompt }))
  answers[`long prompt/${name}`] = await answer(() => generateText({ ...short, model, prompt: question.long_prompt }))
}
tell(answers)
