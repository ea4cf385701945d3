"""The published names of the tensors of families that transformers lacks: by renaming, and by joining tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]

# By model type: the family of transformers that `support.stand_ins` changes into it
CHANGED = {
    "orion": "llama",
    "telechat3": "llama",
    "telechat": "llama",
    "teleflm": "llama",
    "pangu_embedded": "llama",
    "deepseek": "llama",
    "bailing_moe": "llama",
    "bailing_moe_v2": "glm4_moe",
    "param2moe": "glm4_moe",
    "chatglm": "glm",
    "solar": "llama",
    "nemotron-nas": "llama",
    "plamo3": "gemma3",
    "rnj1": "gemma3",
    "domyn_edge": "qwen3",
    "pangu_ultra_moe": "deepseek_v3",
    "mistral_large3": "mistral4",
    "mimo_v2": "mimo_v2_flash",
    "step3_text": "llama",
    "step1": "llama",
    "iquestloopcoder": "llama",
    "bailing_moe_linear": "deepseek_v3",
}
# Further names of architectures that are the same as one that is compared
SAME = {
    "llama": ["LLaMAForCausalLM"],
    "chatglm": ["ChatGLMForConditionalGeneration"],
    "bailing_hybrid": ["BailingHybridForCausalLM"],
}


def renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    """names: patterns of parts of names, and their replacements, which are made one after the other."""
    made = {}
    for old, tensor in tensors.items():
        name = old
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        made[name] = tensor
    return made


def joined(tensors: Tensors, parts: tuple[str, ...], whole: str, heads: int = 1) -> Tensors:
    """Replace the tensors whose names contain `parts` by their concatenation. heads: if more than 1, each of them has
    its rows of all parts in turn."""
    made = dict(tensors)
    for name in tensors:
        if parts[0] not in name:
            continue
        blocks = [made.pop(name.replace(parts[0], part)) for part in parts]
        if heads > 1:
            by_head = torch.cat([block.view(heads, -1, *block.shape[1:]) for block in blocks], 1)
            made[name.replace(parts[0], whole)] = by_head.flatten(0, 1)
        else:
            made[name.replace(parts[0], whole)] = torch.cat(blocks)
    return made


def with_single_experts(tensors: Tensors, prefix: str = r"mlp\.experts") -> Tensors:
    """Give each expert its own tensors, which transformers saves as one."""
    made = {}
    for name, tensor in tensors.items():
        if not re.search(rf"{prefix}\.(gate_up|down)_proj$", name):
            made[name] = tensor
            continue
        start, _, part = name.rpartition(".")
        for index, expert in enumerate(tensor):
            if part == "gate_up_proj":
                gate, up = expert.chunk(2)
                made |= {f"{start}.{index}.gate_proj.weight": gate, f"{start}.{index}.up_proj.weight": up}
            else:
                made[f"{start}.{index}.{part}.weight"] = expert
    return made


QKV = ("q_proj", "k_proj", "v_proj")


def telechat2(tensors: Tensors, config: Config) -> Tensors:
    """Keys and values of each head are in one tensor."""
    heads = config["n_head"]
    tensors = joined(tensors, ("k_proj", "v_proj"), "key_value", heads)
    names = {
        r"^model\.layers": "transformer.h",
        r"^model\.embed_tokens": "transformer.word_embeddings",
        r"^model\.norm": "transformer.ln_f",
        r"self_attn\.q_proj": "self_attention.query",
        r"self_attn\.key_value": "self_attention.key_value",
        r"self_attn\.o_proj": "self_attention.dense",
    }
    return renamed(tensors, names)


def bailing(tensors: Tensors, config: Config) -> Tensors:
    tensors = joined(with_single_experts(tensors), QKV, "query_key_value")
    names = {
        r"self_attn\.o_proj": "attention.dense",
        r"self_attn\.q_norm": "attention.query_layernorm",
        r"self_attn\.k_norm": "attention.key_layernorm",
        r"self_attn": "attention",
        r"embed_tokens": "word_embeddings",
        r"e_score_correction_bias": "expert_bias",
    }
    return renamed(tensors, names)


def chatglm(tensors: Tensors, config: Config) -> Tensors:
    tensors = joined(tensors, QKV, "query_key_value")
    names = {
        r"^model\.layers": "transformer.encoder.layers",
        r"^model\.embed_tokens": "transformer.embedding.word_embeddings",
        r"^model\.norm": "transformer.encoder.final_layernorm",
        r"^lm_head": "transformer.output_layer",
        r"self_attn\.o_proj": "self_attention.dense",
        r"self_attn": "self_attention",
        r"gate_up_proj": "dense_h_to_4h",
        r"down_proj": "dense_4h_to_h",
    }
    tensors = renamed(tensors, names)
    return tensors | {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}


def plamo3(tensors: Tensors, config: Config) -> Tensors:
    """Gemma's norms store their weights less 1. PLaMo's norms after branches store them less other constants."""
    tensors = joined(joined(tensors, QKV, "qkv_proj"), ("gate_proj", "up_proj"), "gate_up_proj")
    names = {
        r"^model\.layers": "model.layers.layers",
        r"self_attn": "mixer",
        r"input_layernorm": "pre_mixer_norm",
        r"post_attention_layernorm": "post_mixer_norm",
        r"pre_feedforward_layernorm": "pre_mlp_norm",
        r"post_feedforward_layernorm": "post_mlp_norm",
    }
    tensors = renamed(tensors, names)
    for part, offset in (("post_mixer_norm", 5**-1.0), ("post_mlp_norm", 5**-1.5)):
        tensors |= {name: tensor + 1 - offset for name, tensor in tensors.items() if part in name}
    return tensors


def pangu_ultra(tensors: Tensors, config: Config) -> Tensors:
    return renamed(with_single_experts(tensors), {r"gate\.e_score": "e_score"})


def mistral_large3(tensors: Tensors, config: Config) -> Tensors:
    names = {
        r"^model\.": "",
        r"^lm_head": "output",
        r"embed_tokens": "tok_embeddings",
        r"input_layernorm": "attention_norm",
        r"post_attention_layernorm": "ffn_norm",
        r"self_attn": "attention",
        r"(kv|q)_a_layernorm": r"\1_a_norm",
        r"\.(q_a|q_b|kv_a|kv_b|q|o)_proj": r".w\1",
        r"mlp\.(gate\.|experts|shared_experts)": r"\1",
        r"mlp\.": "feed_forward.",
        r"gate_proj": "w1",
        r"down_proj": "w2",
        r"up_proj": "w3",
    }
    return renamed(with_single_experts(tensors), names)


def mimo_v2(tensors: Tensors, config: Config) -> Tensors:
    tensors = renamed(with_single_experts(tensors), {r"self_attn\.sinks": "self_attn.attention_sink_bias"})
    return joined(tensors, QKV, "qkv_proj")


def step3(tensors: Tensors, config: Config) -> Tensors:
    """Each projection of all experts of a layer is in one tensor."""
    made = {}
    for name, tensor in tensors.items():
        if ".experts.0." in name:
            singles = [tensors[name.replace(".0.", f".{e}.")] for e in range(config["moe_num_experts"])]
            made[re.sub(r"mlp\.experts\.0", "moe", name)] = torch.stack(singles)
        elif ".experts." not in name:
            made[name] = tensor
    names = {r"mlp\.gate\.": "moe.gate.", r"mlp\.shared_experts": "share_expert", r"q_proj\.(?=q_p|inter|wq)": ""}
    return renamed(made, names)


def bailing_hybrid(tensors: Tensors, config: Config) -> Tensors:
    """transformers saves the last projections of all layers under the name of those with latent attention."""
    made = {}
    for name, tensor in tensors.items():
        has_state = name.replace("dense.weight", "A_log") in tensors
        made[name.replace("dense.weight", "o_proj.weight") if has_state else name] = tensor
    return made


def deepseek_v4(tensors: Tensors, config: Config) -> Tensors:
    """transformers saves some tensors under names that no published checkpoint has."""
    names = {r"^model\.": "", r"^embed_tokens": "embed", r"^hc_head\.hc_": "hc_head_"}
    return renamed(tensors, names)


def bailing_moe_linear(tensors: Tensors, config: Config) -> Tensors:
    names = {
        r"self_attn\.o_proj": "attention.dense",
        r"self_attn": "attention",
        r"embed_tokens": "word_embeddings",
        r"e_score_correction_bias": "expert_bias",
    }
    return renamed(with_single_experts(tensors), names)


def loop_coder(tensors: Tensors, config: Config) -> Tensors:
    return renamed(tensors, {r"layers\.(\d+)\.self_attn\.gate\.": r"gate_projections.\1."})


LAYOUTS: dict[str, Callable[[Tensors, Config], Tensors]] = {
    "telechat": telechat2,
    "bailing_moe": bailing,
    "bailing_moe_v2": bailing,
    "param2moe": bailing,
    "chatglm": chatglm,
    "plamo3": plamo3,
    "pangu_ultra_moe": pangu_ultra,
    "mistral_large3": mistral_large3,
    "mimo_v2": mimo_v2,
    "step3_text": step3,
    "bailing_hybrid": bailing_hybrid,
    "deepseek_v4": deepseek_v4,
    "iquestloopcoder": loop_coder,
    "bailing_moe_linear": bailing_moe_linear,
}
