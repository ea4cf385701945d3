// Embeddings from the npm packages `openai` and `ai`.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany } from 'ai'
import { readFileSync } from 'node:fs'
import OpenAI from 'openai'

const [url, apiKey, model, texts] = JSON.parse(readFileSync(0))
const baseURL = `${url}/v1`
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 })
const provider = createOpenAICompatible({ name: 'quire', baseURL, apiKey })

const vectors = async (options) =>
  (await client.embeddings.create({ model, input: texts, ...options })).data.map((item) => item.embedding)

console.log(JSON.stringify({
  openai: await vectors({ encoding_format: 'float' }),
  'openai, base64': await vectors({}),
  ai: (await embedMany({ model: provider.embeddingModel(model), values: texts, maxRetries: 0 })).embeddings,
}))
