"""Structured outputs: which tokens a request may draw next."""
