"""Computes the reference of ../divergence.py: transformers in float32, with weights dequantized by the package gguf.

    python logits_transformers.py FILE.gguf WINDOWS.json OUT.npy [THREADS]

Writes the logits of all windows. Needs torch, transformers, gguf and accelerate. A folder with a checkpoint in the
Hugging Face layout can replace the file.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from distances import read_windows

path, windows, out = Path(sys.argv[1]), read_windows(Path(sys.argv[2])), sys.argv[3]
torch.set_num_threads(int(sys.argv[4]) if len(sys.argv) > 4 else 2)
folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
rows = sum(len(window) - 1 for window in windows)
result = None
at = 0
with torch.inference_mode():
    for window in windows:
        logits = model(torch.tensor([window[:-1]])).logits[0].numpy()  # [tokens, vocab]
        if result is None:
            result = np.lib.format.open_memmap(out, "w+", np.float32, (rows, logits.shape[1]))
        result[at : at + len(logits)] = logits
        at += len(logits)
print(f'{{"version": "{transformers.__version__}"}}')
