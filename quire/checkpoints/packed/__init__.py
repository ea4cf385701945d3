"""Weights in the form in which they are computed with, kept on disk so that later starts map them instead of reading,
packing and quantizing the checkpoint.

A plug-in: the engine loads it when it loads weights on a CPU.
"""
