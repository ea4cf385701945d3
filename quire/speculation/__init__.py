"""Speculative decoding: proposes the next tokens of a text, which the model then verifies."""
