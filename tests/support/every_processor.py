"""Processors of pictures and sounds for the tiny checkpoints of `support.every_family`, made by rules.

A processor is the one that transformers maps a model type to, with the Pillow back end, the defaults of its classes,
and the sizes of the tiny config. Its special tokens are those that its source code names.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import byte_level_tokenizer
from support.seeing import picture
from support.tiny_configs import FIRST_MARK, HIDDEN, VOCABULARY, Fields

_LITERAL = re.compile(r"""["'](<[|\w/ -]{2,40}\|?>|\[[A-Z_]{2,20}\])["']""")
_NAMED = re.compile(r"""tokenizer\.(\w*token)\b|getattr\(\s*tokenizer,\s*["'](\w*token)["']""")
_VISION = ("vision_config", "vq_config", "visual")
# Types that transformers maps no processor to, with a type that has the one of their published checkpoints.
_PUBLISHED = {
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "glm_ocr": "glm46v",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
}
_OF_TEXT = (
    "add_bos_token",
    "add_eos_token",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class NoProcessorError(Exception):
    """The rules make no processor."""


def with_small_pictures(fields: Fields) -> Fields:
    """The fields of a tiny config whose encoder takes pictures of a few patches."""
    changed = dict(fields)
    for name in _VISION:
        vision = fields.get(name)
        if isinstance(vision, dict) and isinstance(vision.get("patch_size"), int | list | tuple):
            side = vision.get("image_size")
            if isinstance(patch := vision["patch_size"], list | tuple):
                if isinstance(side, list | tuple):
                    changed[name] = {**vision, "image_size": [4 * edge for edge in patch]}
            elif isinstance(side, int):
                changed[name] = {**vision, "image_size": 4 * vision["patch_size"]}
                if points := fields.get("image_grid_pinpoints"):
                    changed["image_grid_pinpoints"] = [
                        [-(-edge // side) * 4 * vision["patch_size"] for edge in point] for point in points
                    ]
            elif isinstance(side, list | tuple):
                changed[name] = {**vision, "image_size": [4 * vision["patch_size"]] * len(side)}
    return changed


@dataclass
class Made:
    """A processor. marks: the ids of the tokens that embeddings replace, by modality. mark: what represents an item of
    its modality, "image" or "audio", in a prompt, which may have `most` items."""

    processor: Any
    marks: dict[str, int]
    modality: str
    mark: str
    most: int = 2


def make(model_type: str, fields: Fields, modality: str = "image") -> Made:
    """fields: of the tiny config. modality: that of the items. Raises NoProcessorError."""
    try:
        return _make(model_type, fields, modality)
    except NoProcessorError:
        raise
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise NoProcessorError(f"its processor cannot be made by rules: {first}") from error


def _make(model_type: str, fields: Fields, modality: str) -> Made:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    model_type = _PUBLISHED.get(model_type, model_type)
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    kind = None if name is None else processor_class_from_name(name)
    if kind is None:
        raise NoProcessorError("transformers maps no processor to it")
    tokenizer = _tokenizer(kind)
    parts = {part: _part(part, model_type, kind, fields, tokenizer) for part in kind.get_attributes()}
    if "video_processor" in parts:
        parts["video_processor"] = parts.get("image_processor")  # some read its settings
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    processor = lenient(**parts, **_matching(inspect.signature(kind.__init__).parameters, fields, parts))
    modality = modality if "image_processor" in parts else "audio"
    mark = getattr(processor, f"{modality}_placeholder_token", None) or getattr(processor, f"{modality}_token", None)
    if mark is None:
        raise NoProcessorError("its processor names no token that represents a picture or a sound")
    made = Made(processor, {}, modality, _enclosed(processor, modality, str(mark)))
    for name in ("image", "video", "audio"):
        token_id = getattr(processor, f"{name}_token_id", None)
        if token_id is None and (token := getattr(processor, f"{name}_token", None)) is not None:
            token_id = tokenizer.convert_tokens_to_ids(str(token))
        if isinstance(token_id, int):
            made.marks[name] = token_id
    for part in ("vision", "audio"):
        if (token := getattr(processor, f"{part}_bos_token", None)) is not None:
            made.marks[f"{part}_start"] = tokenizer.convert_tokens_to_ids(str(token))
    try:
        inputs(made, *items(made)[1])
    except Exception:
        made.most = 1
    text, given = items(made)[0]
    ids = inputs(made, text, given)["input_ids"][0].tolist()
    made.marks[modality] = max((token_id for token_id in ids if token_id >= FIRST_MARK), key=ids.count)
    return made


def hearing(made: Made) -> Made:
    """A processor of pictures and sounds, for the latter."""
    return replace(made, modality="audio", mark=_enclosed(made.processor, "audio", str(made.processor.audio_token)))


def _enclosed(processor: Any, modality: str, mark: str) -> str:
    part = "vision" if modality == "image" else modality
    ends = [getattr(processor, f"{part}_{end}_token", "") for end in ("bos", "eos")]
    return f"{ends[0]}{mark}{ends[1]}"


def _tokenizer(kind: Any) -> Any:
    """A byte-level tokenizer with the special tokens that the class's source names."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    source = Path(inspect.getfile(kind)).read_text()
    code = re.sub(r'"""(?s:.*?)"""', "", source)
    literals = list(dict.fromkeys(_LITERAL.findall(code)))
    named = list(dict.fromkeys(one or two for one, two in _NAMED.findall(code)))
    extra = {name: f"<{name.removesuffix('_token')}>" for name in named if name not in _OF_TEXT}
    tokens = list(dict.fromkeys([*extra.values(), *literals]))[: VOCABULARY - FIRST_MARK]
    made = Tokenizer.from_str(byte_level_tokenizer().to_str())
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<unk>", extra_special_tokens=extra
    )


def _part(name: str, model_type: str, kind: Any, fields: Fields, tokenizer: Any) -> Any:
    if name == "tokenizer":
        return tokenizer
    if name == "image_processor":
        part = _image_class(model_type)
        defaults = part()
        made = part(**_sizes(defaults, fields), **_equal(defaults, fields))
        if getattr(made, "image_seq_length", 0) is None:
            made.image_seq_length = 16
        return made
    if name in ("feature_extractor", "audio_processor"):
        from transformers.models.auto.feature_extraction_auto import (
            FEATURE_EXTRACTOR_MAPPING_NAMES,
            feature_extractor_class_from_name,
        )

        found = FEATURE_EXTRACTOR_MAPPING_NAMES.get(model_type)
        if found is None and "image_processor" in kind.get_attributes():
            return None  # it sees, without its part that hears
        if found is None:
            raise NoProcessorError("transformers maps no feature extractor to it")
        audio = next((fields[name] for name in fields if "audio" in name and isinstance(fields[name], dict)), {})
        bins = audio.get("num_mel_bins")
        return feature_extractor_class_from_name(found)(**({"feature_size": bins} if isinstance(bins, int) else {}))
    return None


def _image_class(model_type: str) -> Any:
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,
        get_image_processor_class_from_name,
    )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    found = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {}
    if not found:  # that of a model with the same processor
        own = PROCESSOR_MAPPING_NAMES.get(model_type)
        same = [name for name, processor in PROCESSOR_MAPPING_NAMES.items() if processor == own]
        found = next(
            (IMAGE_PROCESSOR_MAPPING_NAMES[name] for name in same if name in IMAGE_PROCESSOR_MAPPING_NAMES), {}
        )
    if not found:
        raise NoProcessorError("transformers maps no image processor to it")
    if "pil" not in found and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return get_image_processor_class_from_name(found.get("pil") or found["torchvision"])


def _vision(fields: Fields) -> Fields:
    return next((fields[name] for name in _VISION if isinstance(fields.get(name), dict)), {})


def _sizes(defaults: Any, fields: Fields) -> Fields:
    """The sizes of pictures, if those of the config's encoder are fixed."""
    side = _vision(fields).get("image_size")
    side = side[0] if isinstance(side, list | tuple) else side
    made: Fields = {"max_soft_tokens": 70} if hasattr(defaults, "max_soft_tokens") else {}  # the fewest that it takes
    for name in ("size", "crop_size"):
        size = getattr(defaults, name, None)
        if isinstance(side, int) and size is not None:
            keys = {key for key in ("height", "width", "shortest_edge", "longest_edge") if size.get(key) is not None}
            if keys in ({"height", "width"}, {"shortest_edge"}):
                made[name] = dict.fromkeys(keys, side)
    if isinstance(getattr(defaults, "min_num_patches", None), int):
        made["min_num_patches"] = 16
    return made


def _equal(defaults: Any, fields: Fields) -> Fields:
    """Settings that have the names of the config's fields."""
    vision = {**fields, **_vision(fields)}
    vision.setdefault("merge_size", vision.get("spatial_merge_size"))
    if hasattr(defaults, "image_grid_pinpoints") and "image_grid_pinpoints" in fields:
        return {"image_grid_pinpoints": fields["image_grid_pinpoints"]}
    names = ("patch_size", "merge_size", "temporal_patch_size", "downsample_factor", "spatial_merge_size")
    return {name: vision[name] for name in names if hasattr(defaults, name) and isinstance(vision.get(name), int)}


def _matching(parameters: Any, fields: Fields, parts: Fields) -> Fields:
    """Arguments of the processor that have no default, but the names of the config's fields."""
    vision = _vision(fields)
    known = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    known.update({n: vision[n] for n in ("patch_size", "spatial_merge_size") if isinstance(vision.get(n), int)})
    found = {
        name: known[name]
        for name, parameter in parameters.items()
        if name in known and name not in parts and parameter.default in (None, inspect.Parameter.empty)
    }
    side = vision.get("image_size")
    if isinstance(side, int):
        found.update((name, side) for name in ("img_size", "image_size") if name in parameters)
    if str(vision.get("model_type")).startswith("clip") and "num_additional_image_tokens" in parameters:
        found["num_additional_image_tokens"] = 1
    return found


_MISMATCH = re.compile(r"tokens: (\d+), features:? (\d+)")
_COUNTS = re.compile(r"image_seq_len(gth)?|num_image_tokens|\w*seq_length")


def corrected(made: Made, error: Exception) -> bool:
    """Whether the number of a processor's tokens for a picture could be made that of the encoder's embeddings, which
    are in the error of transformers."""
    found = _MISMATCH.search(str(error))
    if found is None or "0" in found.groups():
        return False
    tokens, features = map(int, found.groups())
    if features == tokens:  # it has counted numbers, not vectors
        features = tokens // HIDDEN
    edge = getattr(made.processor, "patch_size", None)
    if isinstance(edge, int) and edge**2 == tokens and isqrt(features) ** 2 == features:  # it is that of the embeddings
        made.processor.patch_size = made.processor.image_processor.patch_size = isqrt(features)
        return True
    for name in filter(_COUNTS.fullmatch, dir(made.processor)):
        value = getattr(made.processor, name)
        if isinstance(value, int) and value * features % tokens == 0 and features:
            setattr(made.processor, name, value * features // tokens)
            return True
    return False


def save(made: Made, folder: Path) -> None:
    made.processor.tokenizer.save_pretrained(folder)
    parts = ("image_processor", "feature_extractor", "audio_processor")
    present = [part for part in parts if getattr(made.processor, part, None) is not None]
    left_out = {"tokenizer", "video_processor"}
    if len(present) == 1:
        getattr(made.processor, present[0]).save_pretrained(folder)
        left_out.update(parts)
    settings = {name: value for name, value in made.processor.to_dict().items() if name not in left_out}
    (folder / "processor_config.json").write_text(
        json.dumps({**settings, "processor_class": type(made.processor).__name__})
    )


def items(made: Made) -> list[tuple[str, list[Any]]]:
    """Prompts with pictures or sounds."""
    mark = made.mark
    one, two, three = (_item(made.modality, number) for number in (1, 2, 3))
    found = [
        (f"Look: {mark} What is it?", [one]),
        (f"{mark} and {mark}: which?", [two, three]),
        ("A text of its own, a little longer than the others are.", []),
        (f"The same again: {mark} then {mark}.", [one, one]),
        (f"Another: {mark} and the same beginning", [two]),
    ]
    return [(text, given) for text, given in found if len(given) <= made.most]


def _item(modality: str, number: int) -> Any:
    if modality == "image":
        return picture(number, *((60, 45), (90, 64), (64, 64))[number - 1])
    draw = np.random.default_rng(number)
    return draw.normal(0, 0.1, 4000 * number + 8000).astype(np.float32)


def inputs(made: Made, prompt: str, given: list[Any]) -> dict[str, Any]:
    """What transformers' processor makes of a whole prompt."""
    processor = made.processor
    if not given:
        return dict(processor.tokenizer(prompt, return_tensors="pt"))
    name = "images" if made.modality == "image" else "audio"
    settings: Fields = {"return_tensors": "pt"}
    if made.modality == "audio":
        settings["sampling_rate"] = 16000
    try:
        found = dict(processor(text=[prompt], **{name: given}, **settings, return_mm_token_type_ids=True))
    except (TypeError, ValueError):
        found = dict(processor(text=[prompt], **{name: [given]}, **settings))
    return found
