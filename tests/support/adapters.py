"""Adapters as PEFT saves them, with random matrices, and checkpoints into which they are merged by hand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoints.weights import open_checkpoint
from quire.engine.llm import LLM
from quire.layers.embedding import LowRankEmbedding
from quire.lora import LoRARequest
from support.engines import GREEDY, assert_nothing_is_left, runner_of

Sizes = Mapping[str, tuple[int, int]]  # module -> (outputs, inputs)
TABLE = r"embed_tokens|embed_in|word_embeddings|wte"
SIZE = 0.7  # of an adapter's outputs if a layer's own have size 1
NUM_TOKENS = 24
TIE = 1e-3
OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def modules_of(llm: LLM, embedding: bool = True) -> dict[str, tuple[int, int]]:
    """All modules that adapters can change."""
    slots = runner_of(llm).model.adapters
    assert slots is not None
    products = (p for p in slots.products if embedding or not isinstance(p, LowRankEmbedding))
    shapes = (shape for product in products for shape in product.shapes)
    return {part.name: (part.rows, shape.in_features) for shape in shapes for part in shape.parts}


def write_adapter(
    directory: Path,
    modules: Sizes,
    *,
    rank: int = 4,
    seed: int = 0,
    embeddings: Collection[str] = (),
    tensors: Mapping[str, Tensor] | None = None,
    name: str = "adapter_model.safetensors",
    **config: Any,
) -> Path:
    """embeddings: the modules that are tables by token id. config: fields of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": [*modules], **config}
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    draw = torch.Generator().manual_seed(seed)
    made = dict(tensors or {})
    for module, (outs, ins) in modules.items():
        a = torch.randn(rank, ins, generator=draw) / ins**0.5
        b = torch.randn(outs, rank, generator=draw) * SIZE / rank**0.5 / scale
        if module in embeddings:
            a, b = a * ins**0.5, b * 0.2
            made[f"base_model.model.{module}.lora_embedding_A"] = a
            made[f"base_model.model.{module}.lora_embedding_B"] = b
        else:
            made[f"base_model.model.{module}.lora_A.weight"] = a
            made[f"base_model.model.{module}.lora_B.weight"] = b
    (directory / "adapter_config.json").write_text(json.dumps(config))
    if name.endswith(".bin"):
        torch.save(made, directory / name)
    else:
        save_file(made, directory / name)
    return directory


def deltas(adapter: Path) -> dict[str, Tensor]:
    """What an adapter adds to the weights [out, in] of its modules, in float32."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, found = load_file(adapter / "adapter_model.safetensors"), {}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, tensor in tensors.items():
        module = name.removeprefix("base_model.model.")
        if module.endswith(".lora_A.weight"):
            module = module.removesuffix(".lora_A.weight")
            found[module] = scale * tensors[name.replace("lora_A", "lora_B")] @ tensor
        elif module.endswith(".lora_embedding_A"):
            module = module.removesuffix(".lora_embedding_A")
            found[module] = scale * tensor.T @ tensors[name.replace("_A", "_B")].T
    return found


def merged(checkpoint: Path, adapter: Path, directory: Path) -> Path:
    """A copy of the checkpoint with the adapter merged into its weights."""
    shutil.copytree(checkpoint, directory)
    source = open_checkpoint(checkpoint)
    files = {file: load_file(file) for file in directory.glob("*.safetensors")}
    # If the model ties embedding and head, PEFT changes one of the two alone.
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    if not source.has("lm_head.weight") and not source.has("embed_out.weight"):
        for tensors in files.values():
            table = next((t for name, t in tensors.items() if re.search(TABLE, name)), None)
            if table is not None:
                tensors["lm_head.weight"] = table.clone()
        source.names = {**source.names, "lm_head.weight": None}
    for module, delta in deltas(adapter).items():
        name = source.alias(f"{module}.weight")
        [tensors] = [tensors for tensors in files.values() if name in tensors]
        weight = tensors[name]
        is_transposed = ".h." in module and ".c_" in module  # GPT-2
        tensors[name] = (weight.float() + (delta.T if is_transposed else delta)).to(weight.dtype).contiguous()
    for file, tensors in files.items():
        save_file(tensors, file, {"format": "pt"})
    return directory


def certain_tokens(llm: LLM, texts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens up to the first one that a rounding error might change."""
    outputs = llm.generate(texts, GREEDY.clone(max_tokens=NUM_TOKENS, logprobs=2), use_tqdm=False)
    found = []
    for output in outputs:
        [completion] = output.outputs
        gaps = []
        for place in completion.logprobs or []:
            first, second, *_ = sorted((entry.logprob for entry in place.values()), reverse=True)
            gaps.append(first - second)
        count = next((i for i, gap in enumerate(gaps) if gap < TIE), len(gaps))
        found.append(completion.token_ids[:count])
    return found


def adapted_tokens(llm: LLM, texts: list[list[int]], adapters: list[Path | None]) -> list[list[int]]:
    requests = [None if path is None else LoRARequest(path.name, 1, str(path)) for path in adapters]
    params = GREEDY.clone(max_tokens=NUM_TOKENS)
    outputs = llm.generate(texts, params, use_tqdm=False, lora_request=requests)
    assert_nothing_is_left(llm.core)
    return [output.outputs[0].token_ids for output in outputs]


def check(made: list[list[int]], wanted: list[list[int]]) -> None:
    for got, certain in zip(made, wanted, strict=True):
        assert got[: len(certain)] == certain
    assert sum(map(len, wanted)) > len(wanted) * NUM_TOKENS / 2, "there are too many ties"
