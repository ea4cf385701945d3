"""Quantized linear layers: how each checkpoint format is read, and kept in memory in quantized form."""
