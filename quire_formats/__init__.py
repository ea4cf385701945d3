"""Further formats of quantized checkpoints: Marlin's layout, HQQ, torchao. quire/quantization/config.py imports the
module of a format when a checkpoint has it."""
