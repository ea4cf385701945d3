"""Pictures as inputs: fetching, decoding and preprocessing them, and the encoders of models that see. The same for
sounds, and for texts that an encoder reads.

The engine loads it by name, and only for models that need it. Everything but `towers` works without torch.
"""
