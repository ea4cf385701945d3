"""Write a checkpoint in the Hugging Face layout as a GGUF file, for tests and for comparisons with llama.cpp.

    python tools/make_gguf.py CHECKPOINT OUT.gguf [--type F32|F16|BF16|Q4_0|Q4_1|Q5_0|Q5_1|Q8_0]

Needs the `gguf` package for its tensor names and quantizers. K-quants are not possible, since only llama.cpp has
quantizers for them. Tokenizers: byte-level BPE.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {  # by the config's model_type
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "glm4": gguf.MODEL_ARCH.GLM4,
}
PAIRED = {"llama", "mistral", "mixtral", "granite", "smollm3"}  # rotated elements are adjacent in GGUF

Config = dict[str, Any]
Quantizer = Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray]


def rope_of(config: Config) -> dict[str, Any]:
    """Return the RoPE parameters of the full-attention layers, including the base, from either form of the config."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    merged = {"rope_theta": config.get("rope_theta", 10_000.0), **parameters, **(config.get("rope_scaling") or {})}
    return {**merged, "rope_type": merged.get("rope_type", merged.get("type", "default"))}


def write_metadata(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = rope_of(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    writer.add_vocab_size(config["vocab_size"])
    optional = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
    }
    for name, add in optional.items():
        if config.get(name) is not None:
            add(config[name])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if kind == "longrope":
            factor = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors((1 + np.log(factor) / np.log(original)) ** 0.5 if factor > 1 else 1.0)


def write_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, pre: str) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    model = tokenizer["model"]
    names = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for text, i in model["vocab"].items():
        names[i], kinds[i] = text, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        token = settings.get(f"{name}_token")
        if token is not None:
            add(names.index(token if isinstance(token, str) else token["content"]))
    writer.add_add_bos_token(False)
    template = settings.get("chat_template")
    if template is None and (checkpoint / "chat_template.jinja").is_file():
        template = (checkpoint / "chat_template.jinja").read_text()
    if template is not None:
        writer.add_chat_template(template)


def tensors_of(checkpoint: Path, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors of a checkpoint with the values that GGUF stores, but with the checkpoint's names and
    types."""
    kind = config["model_type"]
    heads = config["num_attention_heads"]
    state: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        state.update(load_file(file))
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        tensor = tensor.float()
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
            continue
        if kind in PAIRED and (match := re.search(r"\.([qk])_proj\.", name)):
            count = heads if match[1] == "q" else config.get("num_key_value_heads") or heads
            tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        yield name, tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[e] for e in sorted(parts)])
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_divisors(rope, config)
    if rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"])


def llama3_divisors(rope: dict[str, Any], config: Config) -> torch.Tensor:
    """Return the factor by which Llama 3.1 divides each frequency: 1 for short waves, `factor` for long ones, and an
    interpolation in between.
    """
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def kind_of(name: str, shape: Sequence[int], wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Return the type in which a tensor is stored: F32 for vectors and routers, and Q8_0 (if possible) for rows that do
    not fill the blocks of a K-quant.
    """
    if len(shape) < 2 or re.search(r"\.(gate|shared_expert_gate)\.weight$", name):
        return gguf.GGMLQuantizationType.F32
    kinds = (wanted, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32)
    return next(kind for kind in kinds if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0)


def make_gguf(
    checkpoint: Path, out: Path, type_name: str = "F16", pre: str = "gpt-2", quantize: Quantizer = gguf.quants.quantize
) -> Path:
    """quantize: converts floats into a type's bytes."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    wanted = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch])
    write_metadata(writer, config)
    write_tokenizer(writer, checkpoint, config["vocab_size"], pre)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors_of(checkpoint, config):
        new = name if name.startswith("rope_f") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"GGUF has no name for {name}")
        kind = kind_of(name, tensor.shape, wanted)
        writer.add_tensor(new, quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="F16")
    parser.add_argument("--pre", default="gpt-2", help="llama.cpp's name for the way a text is split before BPE")
    options = parser.parse_args()
    make_gguf(options.checkpoint, options.out, options.type, options.pre)
