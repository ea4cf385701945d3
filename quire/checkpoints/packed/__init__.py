"""Caches packed weights on disk, so that later starts map them instead of reading, packing and quantizing the
checkpoint.

Used when weights are loaded on a CPU.
"""
