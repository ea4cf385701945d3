"""Speculation: guesses of the tokens that follow a text, which the model then verifies."""
