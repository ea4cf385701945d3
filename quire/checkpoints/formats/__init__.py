"""Quantized linear layers: how each checkpoint format is read, and stored in memory in quantized form."""
