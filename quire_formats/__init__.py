"""Further formats of quantized checkpoints: Marlin's layout, HQQ, torchao, types of ggml's blocks. The module of a
format is imported when a checkpoint has it."""
