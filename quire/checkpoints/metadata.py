"""Reads a model's config, tokenizer and generation defaults, from a directory or a GGUF file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.gguf import read_gguf
from quire.checkpoints.gguf_models import gguf_config, gguf_generation_config
from quire.checkpoints.hub import read_json

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


def hf_config(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's config.json, or the same fields from a GGUF file, with the user's overrides."""
    if path.is_file():
        return {**gguf_config(read_gguf(path)), **overrides}
    config = read_json(path, "config.json", required=True)
    if not config.get("quantization_config"):
        settings = read_json(path, "hf_quant_config.json").get("quantization")  # ModelOpt writes its own file
        if settings and settings.get("quant_algo"):  # otherwise only the KV cache is quantized
            config |= {"quantization_config": {"quant_method": "modelopt", **settings}}
    return {**config, **overrides}


def load_tokenizer(path: Path) -> "Tokenizer":
    from quire.text.tokenizer import Tokenizer  # cores in separate processes seldom need it

    return Tokenizer.from_gguf(read_gguf(path).metadata) if path.is_file() else Tokenizer.from_directory(path)


def load_generation_config(path: Path) -> dict[str, Any]:
    return gguf_generation_config(read_gguf(path)) if path.is_file() else read_json(path, "generation_config.json")
