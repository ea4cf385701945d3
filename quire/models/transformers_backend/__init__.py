"""Runs transformers' own modelling code on Quire's paged attention, for architectures that Quire lacks.

It is imported only if `--model-impl transformers` is set.

The model receives the tokens of a step as one sequence, with their positions within their requests. Tokens of different
requests could interact only in attention, which is Quire's; probe.py verifies this.
"""
