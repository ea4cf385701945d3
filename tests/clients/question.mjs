// What every client for Node is asked, and how it returns its answers, as question.py does for Python.

import { readFileSync } from 'node:fs'

export const question = JSON.parse(readFileSync(0))
export const host = question.url.replace(/\/v1$/, '')
export const PARAMETERS = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
export const WEATHER = { name: 'get_weather', description: 'Get the weather of a city.', parameters: PARAMETERS }
export const PLACE = {
  type: 'object', properties: { city: { enum: ['Paris', 'Rome'] } }, required: ['city'], additionalProperties: false,
}

export const tell = (answers) => console.log(JSON.stringify(answers))

// All parts of a stream, or of a promise of one.
export const collect = async (stream) => {
  const parts = []
  for await (const part of await stream) parts.push(part)
  return parts
}

// The error that a question ends in: its type, status and text.
export const answer = async (ask) => {
  try {
    return `no error: ${JSON.stringify(await ask())}`
  } catch (error) {
    return `${error.constructor.name}: ${error.statusCode ?? error.status}: ${error.message}`
  }
}
