"""The model families: each function makes the description of a decoder or encoder (DecoderSpec) from a checkpoint's
config.json. quire/models/registry.toml says which function belongs to which name, and loads it by that."""
