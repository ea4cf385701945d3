"""Parsers of answers: extract reasoning, content and tool calls from the text that a model generates in its own
format."""
