"""transformers' own preprocessing of pictures and sounds, one item at a time.

It runs in a process that has torch, or as a job of `quire.multimodal.through_transformers`. Arguments and results are
plain data.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.utils import logging as transformers_logging

from quire.checkpoints.hub import read_json
from quire.messages.errors import error_text
from quire.models.transformers_backend.published import Published, published_as
from quire.models.transformers_backend.text_models import class_of, has_sections, settings_of
from quire.multimodal.families.transformers import AXES, composed
from quire.text.tokenizer import Tokenizer

Array = npt.NDArray[Any]
_BEFORE, _AFTER = "a ", " b"  # text around an item's placeholder, which must stay as it is
_OF_TEXT = ("input_ids", "attention_mask", "labels", "video_metadata", "text_replacement_offsets")
_SAMPLE_SIDE = 64
_TYPES = {"image": 1, "video": 2, "audio": 3}  # transformers' numbers of modalities


class Preprocessor:
    """Preprocesses the items of one checkpoint. kinds: by modality, the placeholder in a prompt and the id of the
    tokens that are replaced by embeddings."""

    def __init__(self, directory: str, config: dict[str, Any], given: dict[str, Any]) -> None:
        """config: the checkpoint's config.json. given: arguments of the processor that the user has set. Raises
        ValueError if transformers' processor cannot be used."""
        transformers_logging.set_verbosity_error()
        self._processor = _processor(directory, config)
        self._given = given
        self._rope_index = _rope_index(config)
        settings = settings_of(config)
        self._tokenizer = self._processor.tokenizer
        self._texts = _recorded(self._tokenizer)
        self.sample_rate = int(getattr(self._sounds, "sampling_rate", 0) or 0)
        self.kinds: dict[str, tuple[str, int]] = {}
        for modality, part in (("image", "image_processor"), ("audio", None)):
            present = self._sounds is not None if part is None else hasattr(self._processor, part)
            mark = getattr(self._processor, f"{modality}_placeholder_token", None)
            mark = mark or getattr(self._processor, f"{modality}_token", None)
            if present and mark is not None:
                self.kinds[modality] = (self._enclosed(modality, mark), self._token_id(modality, str(mark), settings))
        self._numbered: dict[str, tuple[str, int]] = {}
        if not self.kinds:
            raise ValueError(f"{type(self._processor).__name__} names no token that represents a picture or a sound")

    @property
    def _sounds(self) -> Any:
        return getattr(self._processor, "audio_processor", getattr(self._processor, "feature_extractor", None))

    def _enclosed(self, modality: str, mark: Any) -> str:
        """Return the placeholder with the tokens by which the model finds an item, if the processor names them."""
        part = "vision" if modality == "image" else modality
        first, last = (getattr(self._processor, f"{part}_{end}_token", None) for end in ("bos", "eos"))
        return str(mark) if first is None or last is None else f"{first}{mark}{last}"

    def _token_id(self, modality: str, mark: str, settings: Any) -> int:
        for name in (f"{modality}_token_id", f"{modality}_token_index"):
            if isinstance(token_id := getattr(settings, name, None), int):
                return token_id
        return int(self._tokenizer.convert_tokens_to_ids(mark))

    def image(self, size: tuple[int, int], pixels: bytes) -> dict[str, Any]:
        """size: width, height. pixels: RGB"""
        return self._prepared("image", Image.frombytes("RGB", size, pixels))

    def audio(self, samples: bytes) -> dict[str, Any]:
        """samples: float32, `sample_rate` a second. Raises ValueError for a sound that the processor would cut off."""
        sound = np.frombuffer(samples, np.float32)
        longest = getattr(self._processor, "max_audio_len", None)  # seconds
        if longest is not None and len(sound) > longest * self.sample_rate:
            raise ValueError(f"the sound is longer than {longest:g} s")
        return self._prepared("audio", sound)

    def _prepared(self, modality: str, item: Any) -> dict[str, Any]:
        """Return the item's tensors, as (dtype, shape, bytes), its text, and the number of its embeddings."""
        text, tensors = self._made(modality, item, _BEFORE, _AFTER)
        ids = self._ids(text)
        tensors["input_ids"] = np.array(ids, np.int64)
        return {
            "tensors": {name: (str(a.dtype), list(a.shape), a.tobytes()) for name, a in tensors.items()},
            "text": text,
            "num_embeds": ids.count(self.kinds[modality][1]),
            "numbered": self._numbered.get(modality),
            "rotary": None,
            "lead": 0,
            **({} if self._rope_index is None else self._rotary(modality, ids, tensors)),
        }

    def _rotary(self, modality: str, ids: list[int], tensors: dict[str, Array]) -> dict[str, Any]:
        """Return the fields rotary and lead of Prepared."""
        token_id = self.kinds[modality][1]
        positions = self._positions(modality, ids, tensors)
        first = ids.index(token_id)
        start = next((i for i in range(first) if (positions[:, i] != i).any()), first)
        stop = len(ids)
        while ids[stop - 1] != token_id and (positions[:, stop - 1] == positions[:, : stop - 1].max() + 1).all():
            stop -= 1
        return {"rotary": (positions[:, start:stop] - start).tobytes(), "lead": first - start}

    def _positions(self, modality: str, ids: list[int], tensors: dict[str, Array]) -> Array:
        """Return transformers' rotary positions of a prompt, [axes, tokens], int32."""
        assert self._rope_index is not None
        tokens = torch.tensor([ids])
        types = (tokens == self.kinds[modality][1]).int() * _TYPES[modality]
        given = {name: torch.tensor(array) for name, array in tensors.items()}
        given |= {"input_ids": tokens, "mm_token_type_ids": types, "attention_mask": torch.ones_like(tokens)}
        accepted = inspect.signature(self._rope_index).parameters
        positions, _ = self._rope_index(**{name: value for name, value in given.items() if name in accepted})
        array: Array = positions[:, 0].numpy().astype(np.int32)
        return array

    def _made(self, modality: str, item: Any, before: str, after: str) -> tuple[str, dict[str, Array]]:
        """Return the text that takes the place of an item's placeholder in a prompt, and the item's tensors."""
        mark, _ = self.kinds[modality]
        made = self._call(modality, f"{before}{mark}{after}", [item])
        if len(self._texts) != 1:
            raise ValueError(f"{self.name} does not pass the whole prompt to its tokenizer")
        text = self._texts[0]
        if not (text.startswith(before) and text.endswith(after)):
            raise ValueError(f"{self.name} moves the text around an item")
        tensors = {name: array for name, value in made.items() if (array := _array(name, value)) is not None}
        return text[len(before) : len(text) - len(after)], tensors

    def check(self, modality: str) -> None:
        """Raises ValueError if what the processor makes of an item depends on the rest of the prompt."""
        size = (_SAMPLE_SIDE, _SAMPLE_SIDE)
        item: Any = Image.new("RGB", size) if modality == "image" else np.zeros(self.sample_rate, np.float32)
        text, tensors = self._made(modality, item, _BEFORE, _AFTER)
        _, others = self._made(modality, item, "Another, longer text: ", ".")
        if any(name not in others or not np.array_equal(a, others[name]) for name, a in tensors.items()):
            raise ValueError(f"{self.name} makes tensors that depend on the text of the prompt")
        mark, token_id = self.kinds[modality]
        try:
            made = self._call(modality, f"{_BEFORE}{mark}, {mark}{_AFTER}", [item, item])
        except ValueError:
            return  # it takes one item in a prompt
        self._check_texts(modality, text)
        if self._rope_index is None:
            return
        both = {name: array for name, value in made.items() if (array := _array(name, value)) is not None}
        ids = self._ids(self._texts[0])
        own = self._ids(text)
        made = self._rotary(modality, own, tensors)
        rotary = np.frombuffer(made["rotary"], np.int32).reshape(AXES, -1)
        places = [index for index, token in enumerate(ids) if token == token_id]
        firsts = [place - made["lead"] for place in (places[0], places[len(places) // 2])]
        expected = self._positions(modality, ids, both)
        if not np.array_equal(expected, composed(len(ids), [(first, rotary) for first in firsts])):
            raise ValueError("the rotary positions of its items depend on the rest of the prompt")

    def _check_texts(self, modality: str, text: str) -> None:
        """Compare the recorded text of a prompt with two equal items with an item's own text, in which numbers may
        differ. Raises ValueError."""
        start = f"{_BEFORE}{text}, "
        [both] = self._texts
        other = both[len(start) : len(both) - len(_AFTER)]
        if (numbered := _number(text, other)) is not None:
            self._numbered[modality] = numbered
        if both != f"{start}{other}{_AFTER}" or (numbered is None and other != text):
            raise ValueError(f"what {self.name} makes of an item depends on the rest of the prompt")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @property
    def name(self) -> str:
        return type(self._processor).__name__

    def _call(self, modality: str, text: str, given: list[Any]) -> dict[str, Any]:
        arguments = dict(self._given)
        if modality == "audio":
            arguments["sampling_rate"] = self.sample_rate
        name = "images" if modality == "image" else "audio"
        problem: Exception | None = None
        for items in (given, [given]):
            try:
                return dict(self._processor(text=[text], **{name: items}, return_tensors="pt", **arguments))
            except Exception as error:  # processors and their validators raise many kinds
                problem = problem or error
        assert problem is not None
        raise ValueError(error_text(problem)) from problem


def _number(first: str, second: str) -> tuple[str, int] | None:
    """Return the text before the only number in which two texts differ, and this number in the first one, if it is 0
    or 1, and the next one in the second. None for other texts."""
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    before = first[:same]
    found = re.match(r"[01]", first[len(before) :])
    if found is None or second != f"{before}{int(found[0]) + 1}{first[len(before) + 1 :]}":
        return None
    return before, int(found[0])


def _recorded(tokenizer: Any) -> list[str]:
    """Return a list that will contain the texts of the tokenizer's latest call: those in which the processor has
    replaced the placeholders."""
    kind = type(tokenizer)
    texts: list[str] = []

    def call(self: Any, text: Any, *arguments: Any, **settings: Any) -> Any:
        texts[:] = [text] if isinstance(text, str) else text
        return kind.__call__(self, text, *arguments, **settings)

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return texts


def _rope_index(config: dict[str, Any]) -> Any:
    """Return transformers' function of rotary positions of several axes, None if the model has none."""
    name = class_of(config)
    if name is None or not has_sections(config):
        return None
    with torch.device("meta"):  # without weights
        network = getattr(transformers, name)._from_config(settings_of(config))
    owner = next((part for part in (network, network.base_model) if hasattr(part, "get_rope_index")), None)
    return None if owner is None else owner.get_rope_index


def _array(name: str, value: Any) -> Any:
    """Return a tensor as an array, None for what is no input of an encoder."""
    if name in _OF_TEXT or name.endswith("token_type_ids"):
        return None
    if isinstance(value, list) and value and all(isinstance(part, torch.Tensor) for part in value):
        value = torch.stack(value)
    if isinstance(value, list | int | float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        return None
    return value.numpy()


def _processor(directory: str, config: dict[str, Any]) -> Any:
    """Create the processor of a checkpoint, with Pillow for pictures if transformers has that. Videos need torchvision,
    so the part for pictures takes the place of theirs."""
    folder = Path(directory)
    files = [read_json(folder, name) for name in ("processor_config.json", "preprocessor_config.json")]
    published = published_as(config)
    name = next((f["processor_class"] for f in files if f.get("processor_class")), None)
    if published is not None:
        name = PROCESSOR_MAPPING_NAMES.get(published.model_type) or name
    name = name or PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")))
    kind = None if name is None else processor_class_from_name(name)
    if kind is None or not issubclass(kind, ProcessorMixin):
        raise ValueError(f"transformers has no processor {name or 'for ' + str(config.get('model_type'))}")
    settings, rest = kind.get_processor_dict(directory, local_files_only=True)
    try:
        attributes = kind.get_attributes()
        parts = {attribute: _part(attribute, directory, published, attributes) for attribute in attributes}
    except OSError as error:
        raise ValueError(f"transformers cannot load a part of {kind.__name__}: {error_text(error)}") from error
    lenient: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, argument: None})
    if "video_processor" in parts:
        parts["video_processor"] = parts.get("image_processor")  # some processors read its settings
    return lenient.from_args_and_dict(list(parts.values()), settings, **rest)


def _image_class(model_type: str) -> Any:
    """Return transformers' class that preprocesses pictures, for Pillow if there is one."""
    found = IMAGE_PROCESSOR_MAPPING_NAMES[model_type]
    return get_image_processor_class_from_name(found.get("pil") or found["torchvision"])


def _part(attribute: str, directory: str, published: Published | None, attributes: list[str]) -> Any:
    common = {"local_files_only": True, "trust_remote_code": False}
    if attribute == "image_processor":
        try:
            return AutoImageProcessor.from_pretrained(directory, backend="pil", **common)
        except (OSError, ValueError):
            if published is None or published.pictures is None:
                raise
            return _image_class(published.model_type)(**published.pictures)
    if attribute in ("feature_extractor", "audio_processor"):
        try:
            return AutoFeatureExtractor.from_pretrained(directory, **common)
        except (OSError, ValueError):
            if "image_processor" not in attributes:
                raise
            return None  # a checkpoint of a model that could hear, but has no such part
    if attribute == "tokenizer":
        return _tokenizer(directory, common)
    return None


def _tokenizer(directory: str, common: dict[str, Any]) -> Any:
    """Read the tokenizer with transformers, or with Quire if its files are for code of the checkpoint."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **common)
    except (OSError, ValueError, ImportError):
        made = Tokenizer.from_directory(Path(directory))
        if not isinstance(made.backend, tokenizers.Tokenizer):
            raise
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.backend, **made.special_tokens)
    for name in [name for name, value in tokenizer.init_kwargs.items() if value is None]:
        del tokenizer.init_kwargs[name]  # processors give them to other parts, in place of defaults
    return tokenizer


# ---- functions that jobs name


def load(directory: str, config: dict[str, Any], given: dict[str, Any]) -> Preprocessor:
    """Create a preprocessor, and use it once, so that everything it needs is imported."""
    made = Preprocessor(directory, config, given)
    for modality in made.kinds:
        made.check(modality)
    return made


def facts(made: Preprocessor) -> tuple[dict[str, tuple[str, int]], int]:
    return made.kinds, made.sample_rate


def image(made: Preprocessor, size: tuple[int, int], pixels: bytes) -> dict[str, Any]:
    return made.image(size, pixels)


def audio(made: Preprocessor, samples: bytes) -> dict[str, Any]:
    return made.audio(samples)
