"""Runs transformers' own modelling code on Quire's paged attention, for architectures that Quire lacks.

`--model-impl transformers` asks for it. It is imported only then.

The tokens of a step are one sequence for the model, with the positions that they have in their requests. Tokens of
different requests meet in attention only, and that is Quire's; probe.py makes sure of it.
"""
