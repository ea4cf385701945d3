"""The model families. Each function builds the description of a decoder or encoder (DecoderSpec) from a checkpoint's
config.json. quire/models/registry.toml maps architecture names to these functions."""
