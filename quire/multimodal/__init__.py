"""Pictures as inputs: fetching, decoding and preprocessing them, and the encoders of models that see. The same for
sounds, and for texts that an encoder reads.

The engine imports it only for models that need it. It works without torch; the encoders are in quire/models/towers.
"""
