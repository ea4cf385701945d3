"""Embeds the sentences of benchmarks/embeddings.py, which starts this script, with other programs.

    PYTHON peers/embeddings.py sentence-transformers|"ONNX Runtime"|OpenVINO MODEL SENTENCES

PYTHON is the interpreter of an environment with sentence-transformers, onnx, onnxruntime and openvino. Each line on
standard input is a command to embed all sentences; the reply is a line with the wall time and the processor time in
seconds. The vectors of the first command are saved next to SENTENCES. The last two run the model that torch exports to
ONNX, on batches of 32 sentences of similar length, like those of sentence-transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np
import torch

BATCH = 32


def exported(model: str) -> str:
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(model, attn_implementation="eager").float().eval()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    path = f"{tempfile.mkdtemp()}/model.onnx"
    ids = torch.ones(2, 8, dtype=torch.int64)
    names = ["input_ids", "attention_mask"]
    sizes = {0: "batch", 1: "tokens"}
    torch.onnx.export(
        Hidden(),
        (ids, ids),
        path,
        input_names=names,
        output_names=["hidden"],
        dynamo=False,
        dynamic_axes=dict.fromkeys([*names, "hidden"], sizes),
        opset_version=17,
    )
    return path


def in_batches(model: str, forward: Callable[[Any, Any], Any], sentences: list[str]) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def run() -> Any:
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        vectors: list[Any] = [None] * len(sentences)
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            texts = [sentences[i] for i in chosen]
            batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="np")
            ids = batch["input_ids"].astype(np.int64)
            mask = batch["attention_mask"].astype(np.int64)
            weights = mask[..., None].astype(np.float32)
            mean = (forward(ids, mask) * weights).sum(1) / weights.sum(1)
            for i, vector in zip(chosen, mean / np.linalg.norm(mean, axis=1, keepdims=True), strict=True):
                vectors[i] = vector
        return np.array(vectors)

    return run


def engine(name: str, model: str, sentences: list[str]) -> Callable[[], Any]:
    torch.set_num_threads(os.cpu_count() or 1)
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        transformer = SentenceTransformer(model, device="cpu")
        return lambda: transformer.encode(sentences, batch_size=BATCH)
    if name == "ONNX Runtime":
        import onnxruntime

        session = onnxruntime.InferenceSession(exported(model), providers=["CPUExecutionProvider"])
        return in_batches(
            model, lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0], sentences
        )
    import openvino

    hint = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": os.cpu_count()}
    compiled = openvino.Core().compile_model(exported(model), "CPU", hint)
    return in_batches(model, lambda ids, mask: compiled([ids, mask])[0], sentences)


def main() -> None:
    name, model, file = sys.argv[1:]
    run = engine(name, model, json.loads(Path(file).read_text()))
    np.save(f"{file}.{name}.npy", run())
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        cpu = time.process_time()
        run()
        print(time.perf_counter() - started, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    main()
