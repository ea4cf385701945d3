"""Translates GGUF's metadata and tensor names to the Hugging Face layout, for the architectures that both have."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.checkpoints.errors import WeightError
from quire.checkpoints.gguf import GgufFile, GgufTensor, Stored


@dataclass(frozen=True)
class _Family:
    """How GGUF stores one architecture: see gguf_models.toml."""

    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False
    norm_shift: float = 0.0


_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_FAMILIES = {name: _Family(**fields) for name, fields in _TABLES["families"].items()}


_SAMPLING = {  # GGUF's recommended sampling parameters, by the names of generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def _family(gguf: GgufFile) -> tuple[str, _Family]:
    name = gguf.metadata.get("general.architecture")
    key = "llama with experts" if name == "llama" and gguf.metadata.get("llama.expert_count") else name
    if not isinstance(key, str) or key not in _FAMILIES:
        raise ValueError(f"GGUF files of architecture {name!r} are not supported; supported: {', '.join(_FAMILIES)}")
    return str(name), _FAMILIES[key]


def gguf_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json, from the metadata. Raises ValueError for an unsupported architecture."""
    arch, family = _family(gguf)
    read = {key.removeprefix(f"{arch}."): value for key, value in gguf.metadata.items() if key.startswith(f"{arch}.")}
    fields = {**_TABLES["fields"], **family.fields}
    config = {name: read[key] for name, key in fields.items() if key in read}
    for name, value in config.items():
        if isinstance(value, list):  # one value for each layer
            if len(set(value)) != 1:
                raise ValueError(f"{arch}.{fields[name]} differs between layers, which is not supported")
            config[name] = value[0]
    table = gguf.tensors.get("token_embd.weight")
    if table is None:
        raise WeightError(f"{gguf.path} has no tensor token_embd.weight")
    _check_sizes(gguf, arch, {fields[name]: value for name, value in config.items()})
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "rope.dimension_count" in read:
        if not isinstance(read["rope.dimension_count"], int):
            raise WeightError(f"{gguf.path}: {arch}.rope.dimension_count must be an integer")
        config["partial_rotary_factor"] = read["rope.dimension_count"] / config["head_dim"]
    if scaling := _rope_scaling(gguf, read):
        config["rope_scaling"] = scaling
    # The metadata does not contain the query scale, which is different in the largest model of each of these families.
    if arch in ("gemma2", "gemma3"):
        largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[arch]
        heads = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = heads if largest else config["head_dim"]
    return {
        **config,
        **family.fixed,
        "architectures": [family.architecture],
        "model_type": arch,
        "vocab_size": table.shape[0],
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _check_sizes(gguf: GgufFile, arch: str, read: Mapping[str, Any]) -> None:
    """Raises WeightError for sizes that do not match the tensors, before memory is allocated for them."""
    layers = {match[1] for name in gguf.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
    width = gguf.tensors["token_embd.weight"].shape[-1]
    limits = {"block_count": len(layers), "embedding_length": width, "attention.head_count": width}
    largest = max(math.prod(tensor.shape) for tensor in gguf.tensors.values())
    optional = (key for key in read if re.search(r"(head_count_kv|key_length|expert_count|feed_forward_length)$", key))
    for key in (*limits, *optional):
        value = read.get(key)
        smallest = key in limits or "attention" in key
        if not isinstance(value, int) or not smallest <= value <= limits.get(key, largest):
            raise WeightError(f"{gguf.path}: {arch}.{key} is {value!r}, which its tensors do not have")
    heads = read["attention.head_count"]
    size = read["embedding_length"]
    if heads > size:
        raise WeightError(f"{gguf.path}: {arch}.attention.head_count is {heads}, more than the embedding_length {size}")


def _rope_scaling(gguf: GgufFile, read: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the field rope_scaling. For Llama 3.1 and Phi-3 it is derived from tensors of divisors (one for each
    rotated pair), for other models from the metadata."""
    original = read.get("rope.scaling.original_context_length")
    factor = read.get("rope.scaling.factor")
    common = {"factor": factor, "original_max_position_embeddings": original}
    if "rope_freqs.weight" in gguf.tensors:
        divisors = Stored(gguf.tensors["rope_freqs.weight"]).floats().tolist()
        context = original or read.get("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if "rope_factors_long.weight" in gguf.tensors:
        lists = {
            f"{length}_factor": Stored(gguf.tensors[f"rope_factors_{length}.weight"]).floats().tolist()
            for length in ("long", "short")
        }
        return {**common, **lists, "rope_type": "longrope", "attention_factor": read.get("rope.scaling.attn_factor")}
    kind = read.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type={kind!r} of a GGUF file is not supported; supported: none, linear, yarn")
    return {**common, "rope_type": kind}


def gguf_generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return the fields of generation_config.json, from the metadata: the tokens that end a text, and sampling
    parameters. Raises WeightError."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {key: gguf.metadata[key] for key in keys if key in gguf.metadata}
    if wrong := next((key for key, end in ends.items() if not isinstance(end, int)), None):
        raise WeightError(f"{gguf.path}: {wrong} must be an integer, not of type {type(ends[wrong]).__name__}")
    sampling = {name: gguf.metadata[key] for key, name in _SAMPLING.items() if key in gguf.metadata}
    for key, name in _SAMPLING.items():
        if name in sampling and (isinstance(sampling[name], bool) or not isinstance(sampling[name], int | float)):
            raise WeightError(f"{gguf.path}: {key} must be a number, not of type {type(sampling[name]).__name__}")
    return {"eos_token_id": list(dict.fromkeys(ends.values())), **sampling}


def _rotary_heads(gguf: GgufFile, key: str, tensor: GgufTensor) -> int | None:
    """Return the number of heads in a tensor's rows. Raises WeightError."""
    heads = gguf.metadata.get(key)
    if isinstance(heads, list) and len(set(heads)) == 1:  # one value for each layer
        heads = heads[0]
    if heads is not None and (type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads)):
        raise WeightError(f"{gguf.path}: {key} is {str(heads)[:100]}, which its tensors do not have")
    return heads


def gguf_tensors(gguf: GgufFile) -> dict[str, Stored]:
    """Return the file's tensors by their names in the Hugging Face layout."""
    arch, family = _family(gguf)
    names = {**_TABLES["names"], **family.names}
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"} if family.pairs else {}
    found: dict[str, Stored] = {}
    for name, tensor in gguf.tensors.items():
        stem, _, end = name.rpartition(".")
        if end in ("scale", "input_scale") and f"{stem}.weight" in gguf.tensors:
            continue  # the first is read with the weight; the second would round inputs, which is less accurate
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in names:
            if not name.startswith("rope_f"):  # these divisors are in the config
                found[name] = Stored(tensor)
            continue
        prefix = "" if match[1] is None else f"model.layers.{match[1]}."
        full = f"{prefix}{names[match[2]]}.{match[3]}"
        rotary_heads = _rotary_heads(gguf, f"{arch}.{heads[match[2]]}", tensor) if match[2] in heads else None
        stored = Stored(tensor, None, rotary_heads, -family.norm_shift if "norm" in match[2] else 0.0)
        if match[2] == "ffn_gate_inp_shexp":  # it has one output, so GGUF leaves out the dimension of outputs
            stored = replace(stored, tensor=replace(tensor, shape=(1, tensor.shape[-1])))
        experts = range(tensor.shape[0]) if "{e}" in full else ()
        if match[3] == "weight" and (scale := gguf.tensors.get(f"{stem}.scale")) is not None:
            if scale.shape not in ((1,), (len(experts),)):
                raise WeightError(f"{gguf.path}: {stem}.scale has shape {scale.shape}, which {name} does not have")
            stored = replace(stored, scale=scale)
        found |= {full.replace("{e}", str(e)): replace(stored, expert=e) for e in experts} or {full: stored}
    return found
