"""Write a GGUF file as a checkpoint in the Hugging Face layout with weights in bfloat16, for peers that cannot read
GGUF.

    python gguf_to_hf.py FILE.gguf OUT

Needs Quire, since it uses Quire's loader. Tested with Llama's architecture.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.checkpoints.gguf import read_gguf
from quire.checkpoints.gguf_checkpoint import GgufCheckpoint
from quire.checkpoints.gguf_models import gguf_config, gguf_generation_config, gguf_tensors
from quire.layers.build import WeightSlot
from quire.text.gguf_tokenizer import gguf_tokenizer
from quire.text.tokenizer import Tokenizer

gguf = read_gguf(Path(sys.argv[1]))
out = Path(sys.argv[2])
checkpoint = GgufCheckpoint(gguf_tensors(gguf))
weights = {}
for name, stored in checkpoint.names.items():
    weights[name] = torch.empty(stored.shape, dtype=torch.bfloat16)
    checkpoint.copy_into(WeightSlot(name, weights[name], stored.shape))
backend, special = gguf_tokenizer(gguf.metadata)
Tokenizer(backend, special, {})  # adds the special tokens to the backend
special["chat_template"] = special["chat_template"].get("default")
ends = gguf_generation_config(gguf)

out.mkdir(parents=True, exist_ok=True)
save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
backend.save(str(out / "tokenizer.json"))
for file, fields in {
    "config.json": {**gguf_config(gguf), "hidden_act": "silu", "dtype": "bfloat16", **ends},
    "generation_config.json": ends,
    "tokenizer_config.json": {**special, "tokenizer_class": "PreTrainedTokenizerFast"},
}.items():
    (out / file).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
