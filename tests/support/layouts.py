"""Edits that make saved checkpoints like those of the hub: older fields, other names, extra tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.stand_in_layouts import CHANGED, LAYOUTS

Config = dict[str, Any]
Tensors = dict[str, Tensor]

# Families that transformers lacks, by the family that computes the same, or does so with changed parts
RENAMED = {"internlm2": "llama", "minicpm": "granite", "mimo": "qwen2"}
STAND_INS = {**RENAMED, **CHANGED}


def stand_in_config(kind: str, config: Config) -> Config:
    """A family's differences from the base, in the field names of the family that stands in for it."""
    if kind != "minicpm":
        return config
    config = dict(config)
    layers, hidden = config.get("num_hidden_layers", 3), config.get("hidden_size", 64)
    return {
        "attention_multiplier": (hidden // config.get("num_attention_heads", 4)) ** -0.5,
        "embedding_multiplier": config.pop("scale_emb"),
        "residual_multiplier": config.pop("scale_depth") / math.sqrt(layers),
        "logits_scaling": hidden / config.pop("dim_model_base"),
        **config,
    }


def edit_config(
    directory: Path, kind: str, differences: Config, *, old_rope: bool, without: list[str], adds: Config
) -> None:
    """
    old_rope: write the fields that preceded `rope_parameters`, and `torch_dtype`, as before transformers 5. without:
    fields to drop from the file. adds: fields to add to it.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if kind in RENAMED:
        _under_its_own_name(config, kind, differences)
    if old_rope:
        before_transformers_5(config)
    for name in without:
        del config[name]
    path.write_text(json.dumps({**config, **adds}, indent=2))


def before_transformers_5(config: Config) -> None:
    """Rename the fields to their names before transformers 5."""
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "rope_parameters" in config:
        _old_rope(config, config.pop("rope_parameters"))
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")


def _under_its_own_name(config: Config, kind: str, differences: Config) -> None:
    names = {"internlm2": "InternLM2ForCausalLM", "minicpm": "MiniCPMForCausalLM", "mimo": "MiMoForCausalLM"}
    config.update(model_type=kind, architectures=[names[kind]])
    if kind == "internlm2":
        config["bias"] = config.pop("attention_bias")
        del config["mlp_bias"], config["head_dim"]
    elif kind == "minicpm":
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
            del config[name]
        config.update({name: differences[name] for name in ("scale_emb", "scale_depth", "dim_model_base")})


def _old_rope(config: Config, parameters: Config) -> None:
    family = config["model_type"]
    theta, partial = "rope_theta", "partial_rotary_factor"
    if family == "gpt_neox":
        theta, partial = "rotary_emb_base", "rotary_pct"
    oldest = ("linear", "dynamic", "longrope")
    if "full_attention" in parameters:  # one for each type of layer
        oldest = ()
        if family == "gemma3_text":
            config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    config[theta] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        config[partial] = parameters.pop("partial_rotary_factor")
    if parameters["rope_type"] in oldest or family.startswith("deepseek"):
        parameters["type"] = parameters.pop("rope_type")
    if family == "phi3":
        parameters.pop("original_max_position_embeddings", None)  # it is a field of its own
    config["rope_scaling"] = None if parameters in ({"rope_type": "default"}, {"type": "default"}) else parameters


def edit_tensors(directory: Path, edit: Callable[[Tensors, Config], Tensors]) -> None:
    """Rewrite the weights, of one shard, by a function of (tensors by name, config.json)."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = edit(load_file(path), json.loads((directory / "config.json").read_text()))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def gpt2_hub(tensors: Tensors, config: Config) -> Tensors:
    """openai-community/gpt2 has the names of the inner model, and a causal mask in every layer."""
    length = config["n_positions"]
    mask = torch.ones(1, 1, length, length).tril()
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return tensors | {f"h.{i}.attn.bias": mask.clone() for i in range(config["n_layer"])}


def opt_hub(tensors: Tensors, config: Config) -> Tensors:
    """facebook/opt-125m has the names of the inner model, too."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def falcon_hub(tensors: Tensors, config: Config) -> Tensors:
    """tiiuae/falcon-7b stores its tied embeddings twice."""
    return tensors | {"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}


def bloom_hub(tensors: Tensors, config: Config) -> Tensors:
    """bigscience/bloom-* have the names of the inner model."""
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def gpt_neox_hub(tensors: Tensors, config: Config) -> Tensors:
    """EleutherAI/pythia-* have the buffers of earlier attention layers."""
    length = config["max_position_embeddings"]
    for i in range(config["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{i}.attention."
        tensors[f"{prefix}bias"] = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        tensors[f"{prefix}masked_bias"] = torch.tensor(-1e9)
        tensors[f"{prefix}rotary_emb.inv_freq"] = torch.zeros(4)
    return tensors


def deepseek_v3_hub(tensors: Tensors, config: Config) -> Tensors:
    """DeepSeek-V3 and GLM-4.5 have one layer more than num_hidden_layers, which predicts a second token."""
    last, extra = (f"model.layers.{config['num_hidden_layers'] - i}." for i in (1, 0))
    more = {name.replace(last, extra): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    hidden = config["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        more[f"{extra}{name}.weight"] = torch.ones(hidden)
    more[f"{extra}eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
    more[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors | more


def mimo_hub(tensors: Tensors, config: Config) -> Tensors:
    """MiMo has such layers under a name of their own."""
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    for extra in (f"model.mtp_layers.{i}." for i in range(config["num_nextn_predict_layers"])):
        more = {name.replace(last, extra): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            more[f"{extra}{name}.weight"] = torch.ones(hidden)
        tensors |= more | {f"{extra}input_proj.weight": torch.ones(hidden, 2 * hidden)}
    return tensors


def qwen_mtp_hub(tensors: Tensors, config: Config) -> Tensors:
    """Qwen3-Next and Qwen3.5 have a layer with attention that predicts a second token."""
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    more = {
        name.replace(last, "mtp.layers.0."): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)
    }
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        more[f"mtp.{name}.weight"] = torch.ones(hidden)
    return tensors | more | {"mtp.fc.weight": torch.ones(hidden, 2 * hidden)}


def internlm2_hub(tensors: Tensors, config: Config) -> Tensors:
    """InternLM2 has other names, and one tensor for q, k and v, grouped by KV head."""
    renames = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    kv_heads, hidden = config["num_key_value_heads"], config["hidden_size"]
    head_dim = hidden // config["num_attention_heads"]
    made = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            qkv = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            grouped = torch.cat([part.view(kv_heads, -1, head_dim, hidden) for part in qkv], dim=1)
            made[name.replace("self_attn.q_proj", "attention.wqkv")] = grouped.reshape(-1, hidden)
        elif "k_proj" not in name and "v_proj" not in name:
            pattern = "|".join(map(re.escape, renames))
            made[re.sub(pattern, lambda found: renames[found[0]], name)] = tensor
    return made


def rwkv7_hub(tensors: Tensors, config: Config) -> Tensors:
    """The first checkpoints of flash-linear-attention have the six mixes of a layer in one tensor."""
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.attn.x_"
        tensors[f"{prefix}x"] = torch.stack([tensors.pop(f"{prefix}{key}") for key in "rwkvag"])
    return tensors


def kimi_linear_hub(tensors: Tensors, config: Config) -> Tensors:
    """transformers saves the dense first layer under the name of the layers with experts."""
    return {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in tensors.items()}


def olmo_hybrid_hub(tensors: Tensors, config: Config) -> Tensors:
    """transformers 5.24 divides the convolution of q, k and v into equal parts, and gives the first norms of layers
    with attention the names of the others' second ones."""
    keys = config["linear_num_key_heads"] * config.get("linear_key_head_dim", 12)
    for i, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{i}."
        if kind == "full_attention":
            norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm
            continue
        names = [f"{prefix}linear_attn.{key}_conv1d.weight" for key in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors.update(zip(names, torch.split(whole, [keys, keys, len(whole) - 2 * keys]), strict=True))
    return tensors


def gemma4_hub(tensors: Tensors, config: Config) -> Tensors:
    """google/gemma-4-* have unused keys and values in the layers that read those of others."""
    for i in range(config["num_hidden_layers"] - config["num_kv_shared_layers"], config["num_hidden_layers"]):
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = torch.ones(8, 64)
    return tensors


def hy_v4_hub(tensors: Tensors, config: Config) -> Tensors:
    """transformers 5.24 saves hyper-connections and gates of MLPs under names that no published checkpoint has."""

    def published(name: str) -> str:
        name = re.sub(r"\.hc_pre\.hc_(attn|mlp)_layer\.", r".hc_\1_layer.hc_pre.", name)
        name = re.sub(r"(\.mlp\..*)linear_gate", r"\1gate_proj", name.replace(".mlp.linear_gate", ".mlp.gate_proj"))
        return name.replace(".hc_pre.hc_head.", ".hc_head.")

    return {published(name): tensor for name, tensor in tensors.items()}


def text_layers(wrong: str) -> Callable[[Tensors, Config], Tensors]:
    """transformers 5.24 saves the layers of some text models under names that are meant for the encoder's."""
    name = "language_model.model."
    return lambda tensors, config: {key.replace(f"{name}{wrong}.", f"{name}layers."): tensors[key] for key in tensors}


HUB_LAYOUTS = {
    **LAYOUTS,
    "kimi_k25": text_layers("blocks"),
    "qianfan_ocr": text_layers("encoder.layers"),
    "hy_v4": hy_v4_hub,
    "gemma4_text": gemma4_hub,
    "olmo_hybrid": olmo_hybrid_hub,
    "kimi_linear": kimi_linear_hub,
    "rwkv7": rwkv7_hub,
    "gpt2": gpt2_hub,
    "opt": opt_hub,
    "bloom": bloom_hub,
    "falcon": falcon_hub,
    "gpt_neox": gpt_neox_hub,
    "deepseek_v3": deepseek_v3_hub,
    "deepseek_v32": deepseek_v3_hub,
    "glm_moe_dsa": deepseek_v3_hub,
    "glm4_moe": deepseek_v3_hub,
    "mimo": mimo_hub,
    "qwen3_next": qwen_mtp_hub,
    "qwen3_5_text": qwen_mtp_hub,
    "qwen3_5_moe_text": qwen_mtp_hub,
    "internlm2": internlm2_hub,
}
