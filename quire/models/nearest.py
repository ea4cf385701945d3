"""Which of Quire's families an unknown config.json resembles, by the names of its fields."""

import difflib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any

from quire.checkpoints.config_fields import FIELDS
from quire.models.pooling import describe_pooling
from quire.models.registry import ARCHITECTURES
from quire.models.spec import HfConfig

# Fields that do not change what a model computes, or that other parts of Quire read.
_NEUTRAL = re.compile(
    r"_.*|bf16|fp16|fp32|.*(dropout|dropout_prob|pdrop|_dropout_rate|token_ids?|_loss.*|initializer.*|checkpointing)|"
    r"architectures|model_type|auto_map|(torch_)?dtype|transformers(_js_config|\..*|_version)|use_cache|output_.*|"
    r"return_dict|id2label|label2id|num_labels|problem_type|task_specific_params|pretraining_tp|quantization_config|"
    r"compression_config|is_decoder|tie_word_embeddings|attn_implementation|use_flash_attn|use_bfloat16|"
    r"finetuning_task|gradient_.*|chunk_size_feed_forward|name_or_path|cross_attention_hidden_size|tokenizer_class|"
    r"sentence_transformers|language"
)


def own_fields(config: HfConfig) -> set[str]:
    """Return the names of the fields that describe the layers of a checkpoint's text model."""
    inner = config.get("text_config")
    fields = {**config, **inner} if isinstance(inner, dict) else config
    return {name for name, value in fields.items() if value is not None and not _NEUTRAL.fullmatch(name)}


def read_fields(architecture: str) -> frozenset[str]:
    """Return every string in the code of a family's function and of the functions that it calls. These include the
    names of all config fields that it reads."""
    found = ARCHITECTURES[architecture]
    return _strings(resolve_name(f"quire.models.architectures.{found}") if isinstance(found, str) else found)


def unread_fields(config: HfConfig, architecture: str) -> list[str]:
    """Return the fields of a config that the family never looks up. Many do not matter."""
    return sorted(own_fields(config) - read_fields(architecture) - _strings(describe_pooling))


def nearest(config: HfConfig, most: int) -> list[str]:
    """Return the architectures that read the most fields of a config and the fewest others, the best first. Similar
    names count a little."""
    own = own_fields(config)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""

    def similarity(architecture: str) -> float:
        read = read_fields(architecture)
        known = read & FIELDS
        alike = difflib.SequenceMatcher(None, architecture, name).ratio()
        return len(own & read) / max(1, len(own)) - len(known - own) / max(1, len(known)) + 0.2 * alike

    return sorted(ARCHITECTURES, key=similarity, reverse=True)[:most]


@cache
def _strings(function: Callable[..., Any]) -> frozenset[str]:
    found: set[str] = set()
    seen: set[FunctionType] = set()
    left: list[Any] = [function]
    while left:
        current = left.pop()
        if not isinstance(current, FunctionType) or current in seen or not current.__module__.startswith("quire."):
            continue
        seen.add(current)
        for code in _codes(current.__code__):
            found.update(_texts(code.co_consts))
            left += [current.__globals__.get(name) for name in code.co_names]
    return frozenset(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _texts(constants: Any) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _texts(constant)
