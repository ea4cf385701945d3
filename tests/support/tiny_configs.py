"""Tiny configs of any family of transformers, by rules: its default config with smaller numbers.

The rules know the usual names of sizes, and nothing of any family. If a family's own validators or layers refuse the
result, `repaired` restores defaults until they accept it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import accumulate, islice
from typing import Any

HIDDEN = 64
INTERMEDIATE = 96
HEADS = 4
HEAD_DIM = 16
POSITIONS = 512
WINDOW = 20
VOCABULARY = 320
_LEAST_LAYERS = 3
_MOST_CHANGES = 8
FIRST_MARK = 300  # the ids of pictures and other marks, behind those of the tokenizer
_SECTIONS = {8: [2, 3, 3], 4: [1, 1, 2], 2: [1, 1, 0]}  # of the rotated pairs of a head, by their number
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

Fields = dict[str, Any]
Rule = Callable[[Any, Fields], Any]


def at_most(limit: int) -> Rule:
    return lambda value, fields: min(value, limit)


def exactly(number: Any) -> Rule:
    return lambda value, fields: number


def _kv_heads(value: int, fields: Fields) -> int:
    """One stays one; fewer than the queries' stay fewer."""
    heads = next((fields[name] for name in _HEAD_NAMES if isinstance(fields.get(name), int)), value)
    return 1 if value == 1 else HEADS if value >= heads else HEADS // 2


_HEAD_NAMES = ("num_attention_heads", "n_heads", "n_head", "num_heads", "attention_heads", "decoder_attention_heads")

# The first pattern that matches the whole name decides. Values of the listed types only; 0 and -1 stay.
RULES: list[tuple[str, Rule]] = [
    (r"vocab_size(_per_layer_input)?|unpadded_vocab_size|n_token|encoder_hash_byte_group_vocab", exactly(VOCABULARY)),
    (r"(bos|decoder_start)_token_id", exactly(1)),
    (r"eos_token_id|eod_token_id", exactly(2)),
    (r"_?pad_token_id", exactly(0)),
    (r"\w*(swa|window|chunk)_num_key_value_heads|num_key_value_heads|kv_n_heads|num_kv_heads|n_kv_heads|"
     r"\w*num_(global_)?key_value_heads", _kv_heads),
    (r"(linear_num_key_heads|linear_num_k_heads)", at_most(2)),
    (r"(index_n_heads|indexer_num_heads|index_num_heads)", at_most(16)),  # with few, many scores are 0, which tie
    (r"(mamba_n_heads|mamba_num_heads)", exactly(2 * HIDDEN // HEAD_DIM)),
    (r"num_heads", lambda value, fields: 2 * HIDDEN // HEAD_DIM if "state_size" in fields else min(value, HEADS)),
    (r"\w*(num_attention_heads|attention_heads|n_heads?|num_heads|num_value_heads)", at_most(HEADS)),
    (r"head_dim", lambda value, fields: HEAD_DIM // (2 if value == fields.get("qk_rope_head_dim") else 1)),
    (r"qk_rope_head_dim|rotary_dim|index_rope_head_dim|rope_head_dim", at_most(HEAD_DIM // 2)),
    (r"mamba_(d_head|head_dim|headdim)", exactly(HEAD_DIM)),
    (r"qk_head_dim", exactly(HEAD_DIM + HEAD_DIM // 2)),
    (r"\w*(head_dim|head_size|d_head|dim_head|d_kv|kv_channels|key_dim|value_dim)",
     at_most(HEAD_DIM)),
    (r"q_lora_rank|o_lora_rank", at_most(24)),
    (r"kv_lora_rank|\w*lora_rank|laurel_rank|\w*_rank|d_rel", at_most(16)),
    (r"index_topk|indexer_topk", at_most(24)),
    (r"indexer_kv_heads", at_most(2)),
    (r"indexer_budget", at_most(32)),
    (r"indexer_compress_ratio", at_most(4)),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_?k|num_selected_experts|\w*experts_per_tok|top_k_experts|"
     r"num_activated_experts", at_most(2)),
    (r"n_group|num_expert_groups?|topk_group|topk_groups", at_most(2)),
    (r"(n|num|moe_num)_shared_experts?", at_most(1)),
    (r"\w*(num_experts|routed_experts|local_experts|n_experts|num_moe_experts)", at_most(8)),
    (r"attention_hidden_size", lambda value, fields: HIDDEN * (value // fields["hidden_size"])),
    (r"attention_head_dim", exactly(2 * HIDDEN // HEADS)),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|dim_ff|dff|d_ff|n_inner|d_inner|mlp_dim|ffn_size|"
     r"feed_forward_dim|mlp_hidden_size)", at_most(INTERMEDIATE)),
    (r"\w*(hidden_size\w*|d_model|n_embd|embed_dim|embedding_size|word_embed_proj_dim|projection_dim|"
     r"output_dim|hidden_dim|lru_width|text_hidden_size|output_proj_dims|emb_dim|width)",
     at_most(HIDDEN)),
    (r"(mamba_d_ssm)", exactly(2 * HIDDEN)),
    (r"\w*(d_state|state_size)", at_most(16)),
    (r"time_step_rank|mamba_dt_rank", at_most(8)),
    (r"\w*n_groups?|num_groups|o_groups", at_most(2)),
    (r"\w*chunk_size(_feed_forward)?", at_most(16)),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len\w*|max_sequence_length|seq_length|model_max_length|"
     r"max_positions?|max_target_positions|max_source_positions)", at_most(POSITIONS)),
    (r"original_max_position_embeddings", at_most(64)),
    (r"\w*sliding_window(_size)?|attention_window_size|window_size|attention_chunk_size|\w*window_len|keep_window_size",
     at_most(WINDOW)),
    (r"attn_layer_period|full_attention_interval|global_attn_every_n_layers|no_rope_layer_interval|"
     r"layer_group_size|expert_layer_period|sliding_window_pattern", at_most(2)),
    (r"attn_layer_offset|expert_layer_offset|first_k_dense_replace|num_dense_layers|moe_layer_start_index|"
     r"num_nextn_predict_layers|\w*mtp\w*layers", at_most(1)),
    (r"max_window_layers|insert_layer_id", at_most(1)),
    (r"moe_layer_end_index", at_most(_LEAST_LAYERS - 1)),
    (r"mm_tokens_per_image", at_most(16)),
    (r"num_kv_shared_layers", at_most(1)),
    (r"codebook_size|num_embeddings", at_most(HIDDEN)),
    (r"base_channels", at_most(32)),
    (r"clip_qkv", at_most(8)),
]  # fmt: skip

_NEEDED_COUNTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")  # some are null by default
_OPTIONAL_PARTS = ("vision_config", "audio_config")
_LEFT_OUT = ("transformers_version", "id2label", "label2id")
_DEPTH = re.compile(
    r"(conf_|decoder_|encoder_)?(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|encoder_layers|decoder_layers"
    r"|layers|num_decoder_layers|num_encoder_layers|n_(input|recurrent|output)_layers|num_layers_per_stack"
    r"|resampler_depth)"
)
_MARK = re.compile(r"\w*token_(id|index)")


def shrunk(config: Any) -> Fields:
    """The fields of a tiny config like this default config of its class, with tiny configs in it."""
    defaults = config.to_dict()
    depth = defaults.get("num_hidden_layers") or _depth(defaults)
    parts = _parts_of_the_depth(defaults, depth)
    kept = _kept_layers(defaults, depth, parts)
    marks = iter(range(FIRST_MARK, VOCABULARY))
    fields: Fields = {}
    for name, value in defaults.items():
        if isinstance(value, dict) and hasattr(getattr(config, name, None), "sub_configs"):
            fields[name] = shrunk(getattr(config, name))
        elif value is None and name in _EXAMPLES:
            fields[name] = deepcopy(_EXAMPLES[name])
        elif value is None and name in _OPTIONAL_PARTS and hasattr(part := _part(config, name), "model_type"):
            fields[name] = shrunk(part())
        elif value is None and name in _NEEDED_COUNTS:
            fields[name] = _filled_in(name, defaults)[0]
        elif isinstance(value, bool) or value is None:
            fields[name] = value
        elif name == "per_layer_config" and value:  # by the number of a layer
            numbered = {int(key): item for key, item in value.items()}
            fields[name] = {
                f"{new:02}": {
                    key: _number(key, item, {**defaults, **numbered[old]}, len(kept), marks)
                    for key, item in numbered[old].items()
                }
                for new, old in enumerate(kept)
                if old in numbered
            }
        elif name == "spatial_target_layers" and value:
            fields[name] = [min(layer, _LEAST_LAYERS - 1) for layer in value]
        elif isinstance(value, list | tuple) and depth and len(value) == depth:
            fields[name] = [value[layer] for layer in kept]
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            fields[name] = {key: _rope(key, item) for key, item in value.items()}
            if "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
                pairs = int(HEAD_DIM * value.get("partial_rotary_factor", 1)) // 2
                fields[name]["mrope_section"] = _SECTIONS.get(pairs, [pairs, 0, 0])
        elif isinstance(value, int):
            fields[name] = _number(name, value, defaults, len(kept), marks)
        elif name not in _LEFT_OUT:
            fields[name] = value
    return {**fields, **dict.fromkeys(parts, 2), **({"num_hidden_layers": len(kept)} if parts else {})}


def _part(config: Any, name: str) -> Any:
    """The class of a config in this one, None if there is none, or transformers' AutoConfig."""
    return type(config).sub_configs.get(name)


def _parts_of_the_depth(fields: Fields, depth: int) -> list[str]:
    """The fields that count the layers of successive parts, if there are any."""
    parts = [name for name in fields if re.fullmatch(r"n_\w+_layers", name)]
    return parts if parts and sum(fields[name] for name in parts) == depth else []


def _depth(fields: Fields) -> int:
    return next((v for n, v in fields.items() if _DEPTH.fullmatch(n) and isinstance(v, int)), 0)


def _kept_layers(fields: Fields, depth: int, parts: list[str]) -> list[int]:
    """A layer of each kind, the last one, and the next ones up to the least number; or two layers of each part."""
    if parts:
        ends = list(accumulate(fields[name] for name in parts))
        return [end - fields[name] + i for name, end in zip(parts, ends, strict=True) for i in range(2)]
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == depth]
    kinds = [repr([values[layer] for values in lists]) for layer in range(depth)]
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    chosen = {*first.values(), *([depth - 1] if depth else [])}
    for layer in range(depth):
        if len(chosen) >= min(_LEAST_LAYERS, depth):
            break
        chosen.add(layer)
    return sorted(chosen)


def _number(name: str, value: Any, defaults: Fields, layers: int, marks: Iterator[int]) -> Any:
    if not isinstance(value, int) or value <= 0:
        return value
    if _DEPTH.fullmatch(name):
        return min(value, max(layers, 2))
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            return int(rule(value, defaults))
    return next(marks) if _MARK.fullmatch(name) and value >= FIRST_MARK else value


def _rope(name: str, value: Any) -> Any:
    if isinstance(value, dict):  # by the type of layer
        return {key: _rope(key, item) for key, item in value.items()}
    if name in ("short_factor", "long_factor"):
        return value[: HEAD_DIM // 2]
    if name == "partial_rotary_factor":  # an even number of rotated elements
        return max(2, int(HEAD_DIM * value) // 2 * 2) / HEAD_DIM
    if name == "mrope_section":
        return _SECTIONS[HEAD_DIM // 2]
    if name == "original_max_position_embeddings":
        return min(value, 64)
    return value


# Values of fields that are null by default, and that a model needs
_EXAMPLES: Fields = {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"}

Attempt = Callable[[Fields], Exception | None]


def repaired(fields: Fields, config: Any, attempt: Attempt) -> tuple[Fields, list[str]]:
    """The fields with as few changes as `attempt` needs, and the names of the changed ones: defaults are restored, and
    sizes filled in where the default is null.

    config: the default config. Raises the last error if eight changes do not suffice.
    """
    changes: list[str] = []
    error = attempt(fields)
    for _ in range(_MOST_CHANGES):
        if error is None:
            return fields, changes
        best: tuple[Fields, str, Exception] | None = None
        for path, candidate in islice(_changed(fields, config.to_dict(), str(error)), 80):
            failure = attempt(candidate)
            if failure is None:
                return candidate, [*changes, path]
            if best is None and str(failure) != str(error) and not isinstance(failure, MemoryError):
                best = candidate, path, failure
        if best is None:
            break
        fields, path, error = best
        changes.append(path)
    assert error is not None
    raise error


def _changed(fields: Fields, defaults: Fields, message: str, place: str = "") -> Iterator[tuple[str, Fields]]:
    """The fields with one change, those first that the message names."""
    lacking = re.search(r"Config' object has no attribute '(\w+)'", message)
    if lacking and lacking[1] in _PLAIN_ROPE and lacking[1] not in fields:
        yield f"{place}{lacking[1]}", {**fields, lacking[1]: _PLAIN_ROPE[lacking[1]]}
    for name in sorted(fields, key=lambda name: ("rope" not in name, name not in message)):
        value = fields[name]
        if isinstance(value, dict) and isinstance(defaults.get(name), dict) and name.endswith("_config"):
            for path, part in _changed(value, defaults[name], message, f"{place}{name}."):
                yield path, {**fields, name: part}
            continue
        candidates = []
        if value is None:
            candidates = _filled_in(name, fields)
        elif name == "rope_parameters" and isinstance(value, dict):
            candidates = [{**_PLAIN_ROPE, **value}]
            candidates += [{**_PLAIN_ROPE, **value, "mrope_section": sections} for sections in _SECTIONS.values()]
            candidates += [dict.fromkeys(sorted(set(fields.get("layer_types") or ())), _PLAIN_ROPE)]
        if name == "head_dim" and {"qk_nope_head_dim", "qk_rope_head_dim"} <= fields.keys():
            candidates = [fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]]
        if name in defaults and value != defaults[name]:
            candidates.append(deepcopy(defaults[name]))
        for candidate in candidates:
            yield f"{place}{name}", {**fields, name: candidate}


def _filled_in(name: str, fields: Fields) -> list[Any]:
    if name == "rope_parameters":
        return [_PLAIN_ROPE]
    if name == "layer_types":
        return [["full_attention"] * fields["num_hidden_layers"]]
    return [rule(1 << 30, fields) for pattern, rule in RULES if re.fullmatch(pattern, name)][:1]
