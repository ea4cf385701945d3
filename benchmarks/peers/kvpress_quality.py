"""Runs the measurements of `benchmarks.kv_compression quality` with the package kvpress, on the same token ids.

    python -m benchmarks.peers.kvpress_quality --gguf MODEL.gguf --file inputs.json --json kvpress.json

It needs an environment with kvpress, transformers and gguf, but not Quire. A prompt is computed once without
compression. Each press then compresses the keys and values of all layers in the same way as its hooks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RATIOS = (2, 4, 8, 16)
ANSWER = 6  # tokens
WINDOW, KERNEL, SINKS = 128, 15, 4  # Quire's defaults
# Compute tokens in one forward pass after some presses: an AdaKVPress finds one masking key for all of their queries.
# transformers creates one mask for all layers, which fits the layers of a PyramidKVPress only for single tokens.
STEPS = {"adakv": 16, "pyramidkv": 1}


class Presses:
    def __init__(self, path: Path) -> None:
        from kvpress import AdaKVPress, PyramidKVPress, SnapKVPress, StreamingLLMPress
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: dict[str, Any] = {"gguf_file": path.name}
        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, attn_implementation="sdpa", **where
        ).eval()
        self.layers = self.model.model.layers
        self.calls: list[Any] = []
        for layer in self.layers:
            layer.self_attn.register_forward_pre_hook(self._remember, with_kwargs=True)
        self.make = {
            "snapkv": lambda share: SnapKVPress(share, WINDOW, KERNEL),
            "adakv": lambda share: AdaKVPress(SnapKVPress(share, WINDOW, KERNEL)),
            "pyramidkv": lambda share: PyramidKVPress(share, WINDOW, KERNEL),
            "streaming_llm": lambda share: StreamingLLMPress(share, SINKS),
        }

    def _remember(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.listening:
            self.calls.append((kwargs["hidden_states"] if not args else args[0], kwargs))

    def variants(self) -> list[tuple[str | None, float]]:
        return [(None, 1), *((method, ratio) for method in self.make for ratio in RATIOS)]

    def begin(self, prompt: list[int]) -> None:
        from transformers import DynamicCache

        self.calls = []
        self.listening = True
        self.count = len(prompt)
        self.whole = DynamicCache()
        out = self.model(torch.tensor([prompt]), past_key_values=self.whole, logits_to_keep=1)
        self.listening = False
        self.logits = out.logits[0]

    def end(self, method: str | None, ratio: float) -> Tensor:
        from transformers import DynamicCache

        self.cache, self.position, self.step = DynamicCache(), self.count, STEPS.get(str(method), self.count)
        press = None if method is None else self.make[method](1 - 1 / ratio)
        for index, layer in enumerate(self.layers):
            module = layer.self_attn
            module.masked_key_indices = None
            keys = self.whole.layers[index].keys
            values = self.whole.layers[index].values
            if press is not None:
                hidden, kwargs = self.calls[index]
                keys, values = press.compress(module, hidden, keys, values, None, kwargs)
            self.cache.update(keys.clone(), values.clone(), index)
        return self.logits

    def append(self, tokens: list[int]) -> Tensor:
        found = []
        for start in range(0, len(tokens), self.step):
            ids = torch.tensor([tokens[start : start + self.step]])
            positions = torch.arange(self.position, self.position + ids.shape[1])[None]
            found.append(self.model(ids, past_key_values=self.cache, position_ids=positions).logits[0])
            self.position += ids.shape[1]
        return torch.cat(found)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--needles", type=int, default=1000)
    options = parser.parse_args()
    engine = Presses(options.gguf)
    inputs = json.loads(options.file.read_text())
    losses: dict[str, list[float]] = {}
    found: dict[str, list[bool]] = {}
    for text in inputs["texts"][: options.texts]:
        engine.begin(text[: inputs["length"]])
        behind = text[inputs["length"] :]
        for method, ratio in engine.variants():
            logits = torch.cat([engine.end(method, ratio), engine.append(behind[:-1])])
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(behind)).item()
            losses.setdefault(f"{method} {ratio}", []).append(loss)
        options.json.write_text(json.dumps({"losses": losses, "found": found}))
        print({name: round(of[-1], 4) for name, of in losses.items()}, flush=True)
    for needle in inputs["needles"][: options.needles]:
        engine.begin(needle["prompt"])
        for method, ratio in engine.variants():
            logits = engine.end(method, ratio)
            answer = []
            for _ in range(ANSWER):
                answer.append(int(logits[-1].argmax()))
                logits = engine.append(answer[-1:])
            found.setdefault(f"{method} {ratio}", []).append(needle["answer"] in engine.tokenizer.decode(answer))
        options.json.write_text(json.dumps({"losses": losses, "found": found}))
        print({name: sum(of) for name, of in found.items()}, flush=True)


if __name__ == "__main__":
    main()
