"""GGUF files of every type, written by `tools/make_gguf.py`, and checkpoints with the same weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from support.checkpoints import ALL_VARIANTS, write_checkpoint
from support.families import REFERENCE_CONFIG
from support.families.base import GLOBAL, LOCAL, rope
from support.ggml_blocks import RANDOM, meaning
from support.k_quants import quantize
from support.reference import load

TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
TABLE_TYPES = ["IQ4_NL", "IQ4_XS", "MXFP4"]  # whose codes stand for the values of a table
FURTHER_TYPES = [*RANDOM, "TQ1_0", "TQ2_0"]
WIDE = {  # rows of whole super-blocks
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
FAMILIES: dict[str, dict[str, Any]] = {  # variants of `support.checkpoints`, without what GGUF cannot express
    "llama-gqa2-tied-llama3": {},
    "llama-biases-linear-old": {},
    "mistral-no-window": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": [LOCAL] * 5 + [GLOBAL],
        "rope_parameters": {LOCAL: rope(10_000.0), GLOBAL: rope(1_000_000.0, "linear", factor=8.0)},
    },
    "phi3": {"sliding_window": None},  # llama.cpp ignores it
    "phi3-longrope": {"sliding_window": None},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "cohere2": {},
    "glm4": {},
}


@cache
def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "make_gguf.py"
    spec = importlib.util.spec_from_file_location("make_gguf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(checkpoint: Path, variant: str = "") -> Any:
    """transformers' model of a checkpoint. variant: its variant, if it is one."""
    return load(checkpoint, **REFERENCE_CONFIG.get(variant, {}))


def write_family(directory: Path, variant: str, changes: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of a variant in a form that GGUF can express."""
    kind, config, writing = ALL_VARIANTS[variant]
    config = {**config, **FAMILIES[variant], **(changes or {})}
    return write_checkpoint(directory, kind, config, seed=writing.get("seed", 0))


def write_gguf(checkpoint: Path, out: Path, kind: str = "F32", pre: str = "gpt-2") -> Path:
    made: Path = tool().make_gguf(checkpoint, out, kind, pre, quantize)
    return made


def write_meaning(checkpoint: Path, directory: Path, kind: str) -> Path:
    """Write a checkpoint with the weights of the GGUF file of this type, as the gguf package reads them."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    state = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    for name, tensor in state.items():
        stored_as = tool().kind_of(name, tensor.shape, Type[kind])
        data = quantize(tensor.float().numpy(), stored_as)
        state[name] = torch.from_numpy(meaning(data, stored_as.name).reshape(tensor.shape).copy())
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", "dtype": "float32"}))
    return directory


def in_parts(path: Path, folder: Path, count: int) -> list[Path]:
    """The file's tensors shared out over `count` files, the metadata in the first, as llama.cpp's gguf-split does."""
    reader, parts = gguf.GGUFReader(path), []
    for i in range(count):
        parts.append(folder / f"model-{i + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        if i == 0:
            _copy_metadata(reader, writer)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        _write_tensors(writer, reader.tensors[i::count])
    return parts


def with_tensors(path: Path, out: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A copy of a file of Llama's architecture with further tensors."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(out, "llama")
    _copy_metadata(reader, writer)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    _write_tensors(writer, reader.tensors)
    return out


def with_metadata(path: Path, out: Path, values: dict[str, float | int | str]) -> Path:
    """A copy of the file with further metadata."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer)
    for key, value in values.items():
        add = {float: writer.add_float32, int: writer.add_int32, str: writer.add_string}[type(value)]
        add(key, value)
    _write_tensors(writer, reader.tensors)
    return out


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)


def _write_tensors(writer: gguf.GGUFWriter, tensors: Iterable[gguf.ReaderTensor]) -> None:
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
