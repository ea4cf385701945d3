"""Weights in the form in which they are computed with, kept on disk so that later starts map them instead of reading,
packing and quantizing the checkpoint.

Used when weights are loaded on a CPU.
"""
