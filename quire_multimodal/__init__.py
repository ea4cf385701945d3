"""Pictures as inputs: fetching, decoding and preprocessing them, and the encoders of models that see.

The engine loads it by name, and only for models that see. Everything but `towers` works without torch.
"""
