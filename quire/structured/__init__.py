"""Structured outputs: restrict the tokens that a request may generate next."""
