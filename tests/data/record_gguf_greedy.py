"""Records what llama.cpp continues with, from GGUF files that the tests can write: gguf_greedy.json.

Of each file: its SHA-256; the greedy tokens and by how much each won; and the noise of llama.cpp's arithmetic, which
rounds activations to the weights' precision (quantized types: to eight bits a block): by how much the distance from the
best logit to any of the next nine differs at most from transformers', in float32 with the dequantized weights, over all
positions. Run it where llama_cpp is installed beside what the tests need: python tests/data/record_gguf_greedy.py
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from quire.checkpoints.hub import bundled_model  # noqa: E402
from quire.text.tokenizer import Tokenizer  # noqa: E402
from support.gguf_files import FAMILIES, TYPES, reference, write_family, write_gguf, write_meaning  # noqa: E402
from support.reference import logits, prompts  # noqa: E402

TEXTS = [
    "Once",
    "One day, a little boy named",
    "Mia went to the park with her",
    "There was a big tree in the garden. Under the tree",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "Tom had a small red boat. He took it to the lake every day. " * 3 + "Then",
    "The cat sat on the mat. The dog ran to the door. The bird sang in the tree, and the sun was warm. " * 4 + "At",
]
CONTEXT = 192  # beyond the original length of the model with longrope
NEAREST = 10


def greedy(path: Path, texts: list[list[int]], count: int) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """(tokens and margins, the logits [count, vocab]) of each text; keys and values are kept in float32."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=1, n_gpu_layers=0, type_k=0, type_v=0, flash_attn=False, verbose=False
    )
    made, seen = [], []
    for text in texts:
        llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        tokens, margins, rows = [], [], []
        feed = text
        for _ in range(count):
            llama.eval(feed)
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),)).copy()
            best, second = np.argsort(row)[::-1][:2]
            tokens.append(int(best))
            margins.append(round(float(row[best] - row[second]), 4))
            rows.append(row)
            feed = [int(best)]
        made.append({"tokens": tokens, "margins": margins})
        seen.append(np.stack(rows))
    return made, seen


def noise(model: Any, texts: list[list[int]], made: list[dict[str, Any]], seen: list[np.ndarray]) -> float:
    """Of llama.cpp's logits; see above."""
    largest = 0.0
    for text, continuation, rows in zip(texts, made, seen, strict=True):
        theirs = torch.from_numpy(rows)
        ours = logits(model, text + continuation["tokens"][:-1])[len(text) - 1 :]
        near = theirs.topk(NEAREST, dim=-1).indices
        distances = [values.gather(1, near[:, :1]) - values.gather(1, near) for values in (theirs, ours)]
        largest = max(largest, float((distances[0] - distances[1]).abs().max()))
    return largest


def record(
    folder: Path, checkpoint: Path, variant: str, kind: str, texts: list[list[int]], count: int, pre: str
) -> dict[str, Any]:
    path = write_gguf(checkpoint, folder / "model.gguf", kind, pre)
    made, seen = greedy(path, texts, count)
    model = reference(write_meaning(checkpoint, folder / "meaning", kind), variant)
    found = noise(model, texts, made, seen)
    certain = sum(margin > found for c in made for margin in c["margins"])
    print(f"{variant or 'bundled':24} {kind:5} noise {found:.5f}, {certain} of {count * len(texts)} beyond it")
    return {
        "variant": variant,
        "type": kind,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "noise": float(f"{found:.2g}"),
        "continuations": made,
    }


def main() -> None:
    tokenizer = Tokenizer.from_directory(bundled_model())
    texts, few = [tokenizer.encode(text) for text in TEXTS], prompts(300, 9)[1:8:6]
    cases = [("", kind) for kind in TYPES] + [(variant, "F32") for variant in FAMILIES]
    recorded = []
    for variant, kind in cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if variant:
                checkpoint = write_family(folder / "checkpoint", variant)
                recorded.append(record(folder, checkpoint, variant, kind, few, 16, "gpt-2"))
            else:
                recorded.append(record(folder, bundled_model(), "", kind, texts, 24, "llama-bpe"))
    data = {"llama_cpp": llama_cpp.__version__, "texts": texts, "family_texts": few, "cases": recorded}
    (HERE / "gguf_greedy.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
