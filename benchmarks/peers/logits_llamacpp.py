"""Measures how far llama.cpp's or ik_llama.cpp's distributions are from the reference's, for ../divergence.py.

python logits_llamacpp.py FILE.gguf WINDOWS.json REFERENCE.npy [THREADS]
"""

import json
import sys
from pathlib import Path

import numpy as np
from distances import Distances, read_windows
from llama_api import VERSION, Context

windows = read_windows(Path(sys.argv[2]))
threads = int(sys.argv[4]) if len(sys.argv) > 4 else 2
context = Context(sys.argv[1], max(map(len, windows)), 1, threads)
distances = Distances(np.load(sys.argv[3], mmap_mode="r"))
for window in windows:
    context.keep(0, 0)
    logits = context.decode([(token, position, 0, True) for position, token in enumerate(window[:-1])])
    distances.add(np.stack(logits), window[1:])
print(json.dumps({"version": VERSION, "system": context.system_info, **distances.summary()}), flush=True)
