"""Parsers of answers: reasoning, content and tool calls, from the text that a model writes in its own format."""
