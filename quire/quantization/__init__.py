"""Checkpoints whose linear layers are quantized: how each format is read, and kept in memory without expanding it."""
