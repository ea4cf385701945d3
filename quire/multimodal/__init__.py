"""Images as inputs: fetching, decoding and preprocessing them for models with image input. The same for audio, and for
texts that an encoder reads.

The engine only imports it for models that need it. It works without torch; the encoders are in quire/models/towers.
"""
