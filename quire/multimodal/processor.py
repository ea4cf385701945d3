"""Inserts images and audio into prompts: a placeholder is replaced by as many tokens as the item has embeddings."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from quire.checkpoints.metadata import load_generation_config
from quire.config.declaration import ConfigError
from quire.config.multimodal import MOST_GIVEN_FRAMES, MultiModalConfig
from quire.messages.errors import error_text
from quire.messages.media import Buffer, EncoderLimits, MediaItem, MediaPlace
from quire.multimodal.content import MediaPart, Sources, split_content
from quire.multimodal.decoding import Encoded, ItemCache, decoded, refusal
from quire.multimodal.embeds import CHUNK, buffer_of, decode_embeddings
from quire.multimodal.encoder_prompts import EncoderPrompts
from quire.multimodal.families.base import MOST_ITEMS, Family, Frames, Kind, Placed, Prepared
from quire.multimodal.families.text import Texts
from quire.multimodal.families.whisper import Sounds
from quire.multimodal.pictures import MediaError, picture
from quire.multimodal.preprocessing import read_settings
from quire.multimodal.sounds import sound
from quire.multimodal.spec import MediaSpec
from quire.multimodal.speech import Speech
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Expanded:
    """A prompt with its media. rotary_positions: see NewRequest."""

    token_ids: list[int]
    media: list[MediaItem]
    rotary_positions: bytes = b""


class MediaProcessor:
    """Processes the media of one model's prompts."""

    def __init__(
        self,
        spec: MediaSpec | None,
        directory: Path,
        tokenizer: Tokenizer,
        limits: EncoderLimits,
        options: MultiModalConfig,
        hidden_size: int,
    ) -> None:
        """spec: None for a model that only accepts embeddings. hidden_size: of the embeddings."""
        self.tokenizer = tokenizer
        self.limits = limits
        self._most_items = options.most_items
        if spec is not None and not spec.own_preprocessing and options.language_model_only:
            spec = None  # its processor may need packages that are not installed
        if spec is not None and spec.mark:
            spec = replace(spec, config={**spec.config, "image_token_id": self._id_of(spec.mark)})
        self._spec = spec
        self._embeds_size = hidden_size if options.enable_prompt_embeds else 0
        self._settings = settings_of(spec, directory, options.mm_processor_kwargs)
        self._family = None if spec is None else self._usable_family(options.mm_processor_kwargs)
        self._sources = Sources(options, 0 if self._family is None else self._family.sample_rate)
        self._cache = ItemCache(int(options.mm_processor_cache_gb * 2**30))
        self.speech: Speech | None = None  # of a model that generates transcripts
        self.texts: EncoderPrompts | None = None  # of a model with a text encoder
        if isinstance(self._family, Sounds):
            self.speech = self._family.speech(tokenizer, load_generation_config(directory))
        elif isinstance(self._family, Texts) and spec is not None and (encoder := spec.encoder) is not None:
            beginning = self._family.beginning(load_generation_config(directory))
            self.texts = EncoderPrompts(tokenizer, limits, beginning, encoder.vocab_size, encoder.max_positions)

    def _id_of(self, mark: str) -> int:
        """Raises ConfigError."""
        token_id = self.tokenizer.token_to_id(mark)
        if token_id is None:
            raise ConfigError(f"the tokenizer has no token {mark}, which represents pictures")
        return token_id

    def _load(self, settings: Mapping[str, Any]) -> Family:
        assert self._spec is not None

        def token(token_id: int) -> str:
            return self.tokenizer.id_to_token(token_id) or ""

        family = load_family(self._spec, {**self._settings, **settings}, token)
        family.most_embeds = self.limits.capacity
        return family

    def _usable_family(self, given: Mapping[str, Any]) -> Family:
        """given: the value of the option mm_processor_kwargs. Raises ConfigError if preprocessing fails with it."""
        try:
            family = self._load({})
            if given and "image" in family.kinds:
                family.image(Image.new("RGB", (64, 64)))
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            if not given:
                raise
            message = f"mm_processor_kwargs={dict(given)!r} cannot be used with this model: {error_text(error)}"
            raise ConfigError(message) from error
        return family

    def family(self, kwargs: Mapping[str, Any] | None) -> Family:
        """Return the preprocessing with a request's settings. Raises MediaError."""
        if self._family is None:
            raise MediaError("this model takes no pictures")
        return self._load(self._adjusted(kwargs)) if kwargs else self._family

    def _adjusted(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a request changes. Raises MediaError."""
        assert self._family is not None
        allowed = self._family.adjustable
        adjusted = dict[str, Any]()
        for name, value in kwargs.items():
            nested = {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else None
            for path, given in (nested or {name: value}).items():
                if path not in allowed:
                    known = ", ".join(allowed) or "none"
                    raise MediaError(f"mm_processor_kwargs: a request cannot change {path[:64]!r}, but only: {known}")
                most = allowed[path]
                is_number = isinstance(given, int) and not isinstance(given, bool)
                if most is None and not isinstance(given, bool):
                    raise MediaError(f"mm_processor_kwargs: {path} must be true or false")
                if most is not None and not (is_number and 1 <= given <= most):
                    raise MediaError(f"mm_processor_kwargs: {path} must be a number from 1 to {most}")
            adjusted[name] = {**(self._settings.get(name) or {}), **value} if nested else value
        return adjusted

    def prepare(self, part: MediaPart, kwargs: Mapping[str, Any] | None = None) -> Prepared:
        """Fetch an item of a conversation, and preprocess it. kwargs: see `expand`. Raises MediaError that names the
        part."""
        family = self.family(kwargs)
        value = self._sources.read(part)
        try:
            return _prepare(family, part.modality, value.decode() if isinstance(value, Encoded) else value)
        except MediaError as error:
            raise MediaError(f"{part.where}: {error_text(error)}") from error

    # `prepare` in steps, for servers: they decode in worker processes, and cache the results.

    def read(self, part: MediaPart, kwargs: Mapping[str, Any] | None) -> tuple[Encoded | None, Prepared | None]:
        """Fetch an item: encoded, or preprocessed if it is in the cache. Raises MediaError that names the part."""
        self.family(kwargs)  # raises MediaError
        encoded = self._sources.read(part)
        return (encoded, self._cache.get(encoded.key(kwargs))) if isinstance(encoded, Encoded) else (None, None)

    def finish(self, part: MediaPart, encoded: Encoded, job: Future[Any], kwargs: Mapping[str, Any] | None) -> Prepared:
        """Preprocess an item that a job has decoded. Raises MediaError, which names the part, BusyError or
        WorkerError."""
        try:
            value = self.result(encoded, job)
            prepared = _prepare(self.family(kwargs), part.modality, value)
        except MediaError as error:
            raise MediaError(f"{part.where}: {error_text(error)}") from error
        self._cache.put(encoded.key(kwargs), prepared)
        return prepared

    def result(self, encoded: Encoded, job: Future[Any]) -> Any:
        """Return the item that a finished job has decoded. Raises MediaError, BusyError or WorkerError."""
        try:
            return decoded(encoded.kind, job.result())
        except ValueError as error:
            raise refusal(error) from error

    def sound(self, data: bytes) -> Encoded:
        """Return the audio file of a transcription request. Raises MediaError."""
        return Encoded("audio", (data,), 0 if self._family is None else self._family.sample_rate)

    @property
    def needs_media(self) -> bool:
        """Whether a prompt must have an item."""
        return self._family is not None and self._family.crossed > 0

    @property
    def silence(self) -> Any:
        """Return short audio, for a model that requires an item."""
        assert self._family is not None
        return np.zeros(self._family.sample_rate // 10, np.float32)

    @property
    def kinds(self) -> dict[str, Kind]:
        return {} if self._family is None else self._family.kinds

    @property
    def placeholders(self) -> dict[str, str]:
        """By modality: the text that represents an item in a prompt. Modalities without one are not allowed in
        chats."""
        return {name: kind.placeholder for name, kind in self.kinds.items() if kind.placeholder}

    def split(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[MediaPart]]:
        """See split_content."""
        return split_content(messages, self.placeholders)

    def most(self, modality: str) -> int:
        """Return how many items of a modality a prompt may have. Raises MediaError if the model accepts none."""
        if modality not in self.kinds:
            raise MediaError(f"this model takes no {modality}; it takes {', '.join([*self.kinds, 'text'])}")
        return min(self._most_items(modality, MOST_ITEMS), self.kinds[modality].most)

    def check_count(self, modality: str, count: int) -> None:
        """Raises MediaError."""
        if count > (most := self.most(modality)):
            raise MediaError(
                f"the prompt has {count} items of modality {modality}; at most {most} are allowed (limit_mm_per_prompt)"
            )

    def expand(
        self,
        prompt: str | list[int],
        data: Mapping[str, Any],
        uuids: Mapping[str, Any] = {},
        kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
    ) -> Expanded:
        """Return the tokens of a prompt with its media.

        data: by modality, one item or several: PIL images or arrays; for a video, a list of them, or an array [frames,
        height, width, 3]; for audio, see `sound`; or results of `prepare`. uuids: names under which the items'
        embeddings can be shared; None for an item without a name. kwargs: preprocessing settings. Raises MediaError.
        """
        family = self.family(kwargs)
        prepared: dict[str, list[Prepared]] = {}
        names: dict[str, list[Any]] = {}
        for modality, values in data.items():
            items = _as_items(modality, values)
            self.check_count(modality, len(items))
            names[modality] = _as_list(uuids.get(modality)) or [None] * len(items)
            if len(names[modality]) != len(items):
                raise MediaError(
                    f"multi_modal_uuids has {len(names[modality])} names for {len(items)} items of {modality}"
                )
            prepared[modality] = [_prepare(family, modality, item) for item in items]
        if family.crossed:
            return self._beside(family, prompt, prepared, uuids, kwargs)
        token_ids, order = self._tokens(family, prompt, prepared, add_special_tokens)
        found = [(modality, prepared[modality][number]) for modality, number in order]
        media = list[MediaItem]()
        placed = list[Placed]()
        for (modality, number), positions in zip(order, _positions(family, found, token_ids), strict=True):
            item = prepared[modality][number]
            key = _key(modality, item, names[modality][number], kwargs)
            whole = family.whole and modality != "audio"
            place = MediaPlace(key, positions[0], positions[-1] + 1 - positions[0], _spans(positions), whole)
            if family.whole_prompt:
                place = _of_prompt(place, token_ids)
            media.append(MediaItem(place, modality, buffers(item)))
            placed.append(Placed(positions, item))
        self._check_sizes(media)
        rotary = family.rotary_positions(token_ids, placed)
        return Expanded(token_ids, media, b"" if rotary is None else rotary.astype(np.int32).tobytes())

    def _beside(
        self,
        family: Family,
        prompt: str | list[int],
        prepared: Mapping[str, Sequence[Prepared]],
        uuids: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Expanded:
        """Return a prompt of a model that reads its item by cross-attention. Its text already contains all special
        tokens."""
        found = [(modality, item) for modality, items in prepared.items() for item in items]
        if len(found) != 1:
            raise MediaError(f"this model takes one item of {', '.join(family.kinds)} in a prompt, got {len(found)}")
        [(modality, item)] = found
        key = _key(modality, item, next(iter(_as_list(uuids.get(modality))), None), kwargs)
        media = [MediaItem(MediaPlace(key, 0, 1, [], crossed=family.crossed), modality, buffers(item))]
        self._check_sizes(media)
        return Expanded(self.tokenizer.encode(prompt, False) if isinstance(prompt, str) else list(prompt), media)

    def _check_sizes(self, media: Sequence[MediaItem]) -> None:
        try:
            self.limits.check(item.place for item in media)
        except ValueError as error:
            raise MediaError(error_text(error)) from error

    def embeddings(self, value: Any) -> Expanded:
        """Return a prompt of embeddings. value: a tensor or an array [tokens, hidden], or the base64 text of one.
        Raises MediaError."""
        if not self._embeds_size:
            raise MediaError("prompt_embeds needs an engine with enable_prompt_embeds")
        try:
            found = decode_embeddings(value) if isinstance(value, str) else buffer_of(value)
        except MediaError as error:
            raise MediaError(f"prompt_embeds: {error_text(error)}") from error
        (count, hidden), media = found.shape, []
        if hidden != self._embeds_size:
            raise MediaError(f"prompt_embeds has vectors of {hidden} numbers, and the model's have {self._embeds_size}")
        width = len(found.data) // count
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            data = found.data[start * width : (start + size) * width]
            key = sha256(f"embeds {found.dtype} {hidden} ".encode() + data).hexdigest()
            place = MediaPlace(key, start, size, [(0, size)])
            media.append(MediaItem(place, "embeds", {"embeds": Buffer(found.dtype, [size, hidden], data)}))
        return Expanded([0] * count, media)

    def _tokens(
        self, family: Family, prompt: str | list[int], prepared: Mapping[str, Sequence[Prepared]], special: bool
    ) -> tuple[list[int], list[tuple[str, int]]]:
        """Return the tokens of the prompt, with each placeholder replaced by the text of its item, and the items in
        order: (modality, index within the modality)."""
        marks = {family.kinds[modality].placeholder: modality for modality in prepared}
        order = list[tuple[str, int]]()
        counts = Counter[str]()

        def text_of_next(modality: str) -> str:
            number = counts[modality]
            items = prepared[modality]
            counts[modality] += 1
            order.append((modality, number))
            return items[number].text_at(number) if number < len(items) else ""

        def check() -> None:
            for modality, items in prepared.items():
                if counts[modality] != len(items):
                    raise MediaError(
                        f"the prompt has {counts[modality]} placeholders for {len(items)} items of modality {modality}"
                    )

        if isinstance(prompt, str):
            if prepared and (framed := family.framed(prompt)) is not None:
                prompt, special = framed, False
            pattern = "|".join(map(re.escape, marks))
            text = re.sub(pattern, lambda mark: text_of_next(marks[mark[0]]), prompt) if marks else prompt
            check()
            return self.tokenizer.encode(text, special), order
        of_marks = {modality: self.tokenizer.encode(mark, False) for mark, modality in marks.items()}
        token_ids = list[int]()
        start = 0
        while start < len(prompt):
            marked = next((m for m, ids in of_marks.items() if prompt[start : start + len(ids)] == ids), None)
            if marked is None:
                token_ids.append(prompt[start])
                start += 1
            else:
                token_ids += self.tokenizer.encode(text_of_next(marked), False)
                start += len(of_marks[marked])
        check()
        return token_ids, order


def settings_of(spec: MediaSpec | None, directory: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's preprocessing: the checkpoint's, which transformers reads itself, and the given
    ones."""
    own = {} if spec is None or not spec.own_preprocessing else read_settings(directory)
    return {**own, **given}


def load_family(spec: MediaSpec, settings: Mapping[str, Any], token: Callable[[int], str]) -> Family:
    """Create the family that the spec names. settings: of its processor. token: maps an id to the token's text."""
    module = import_module(f"quire.multimodal.families.{spec.preprocessing or spec.family}")
    if hasattr(module, "Items"):
        own: Family = module.Items(spec.directory, spec.config, settings)
        own.whole = spec.two_way
        return own
    make = next(getattr(module, name) for name in ("Pictures", "Sounds", "Texts") if hasattr(module, name))
    family: Family = make(spec.config, settings, token)
    return family


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def buffers(item: Prepared) -> dict[str, Buffer]:
    return {name: Buffer(str(a.dtype), list(a.shape), a.tobytes()) for name, a in item.tensors.items()}


def _as_items(modality: str, values: Any) -> list[Any]:
    if modality == "audio" and isinstance(values, tuple):  # (array, rate)
        return [values]
    if modality != "video":
        return _as_list(values)
    several = isinstance(values, list | tuple) and bool(values)
    if several and (isinstance(values[0], list | Frames | Prepared) or getattr(values[0], "ndim", 0) == 4):
        return list(values)
    return [values]


def _prepare(family: Family, modality: str, value: Any) -> Prepared:
    if isinstance(value, Prepared):
        return value
    if modality == "image":
        return family.image(picture(value))
    if modality == "audio":
        return family.audio(sound(value, family.sample_rate))
    frames = value if isinstance(value, Frames) else Frames([picture(frame) for frame in value])
    if not 0 < len(frames.images) <= MOST_GIVEN_FRAMES:
        raise MediaError(f"a video has 1 to {MOST_GIVEN_FRAMES} frames, got {len(frames.images)}")
    return family.video(frames)


def _positions(family: Family, found: Sequence[tuple[str, Prepared]], token_ids: list[int]) -> list[list[int]]:
    """Return for each item the positions of its embeddings. found: (modality, item) in the order of the prompt."""
    needed = Counter[int]()
    for modality, item in found:
        needed[family.kinds[modality].token_id] += item.num_embeds
    positions_of: dict[int, list[int]] = {token_id: [] for token_id in needed}
    for position, token in enumerate(token_ids):
        if token in positions_of:
            positions_of[token].append(position)
    parts = []
    starts = Counter[int]()
    for modality, item in found:
        token_id = family.kinds[modality].token_id
        if (count := len(positions_of[token_id])) != needed[token_id]:
            raise MediaError(
                f"the prompt has {count} tokens for the {needed[token_id]} embeddings of its items of "
                f"modality {modality}; it must not contain the token itself"
            )
        parts.append(positions_of[token_id][starts[token_id] : starts[token_id] + item.num_embeds])
        starts[token_id] += item.num_embeds
    return parts


def _of_prompt(place: MediaPlace, token_ids: Sequence[int]) -> MediaPlace:
    """Return the place of an item that consists of the whole prompt, whose tokens attend to each other: what is
    computed of each depends on all of them."""
    key = sha256(f"{place.key} {list(token_ids)}".encode()).hexdigest()
    spans = [(first + place.start, count) for first, count in place.spans]
    return msgspec.structs.replace(place, key=key, start=0, length=len(token_ids), spans=spans)


def _spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return positions as (first, count) of consecutive runs, relative to the first position."""
    runs = [list(run) for _, run in groupby(enumerate(positions), lambda pair: pair[1] - pair[0])]
    return [(run[0][1] - positions[0], len(run)) for run in runs]


def _key(modality: str, item: Prepared, name: str | None, kwargs: Mapping[str, Any] | None) -> str:
    """Return a hash of everything that the item's embeddings depend on. Named items are identified by their names."""
    shapes = sorted((n, str(a.dtype), a.shape) for n, a in item.tensors.items())
    digest = sha256(json.dumps([modality, shapes, name], sort_keys=True).encode())
    if name is None:
        for _, tensor in sorted(item.tensors.items()):
            digest.update(tensor.tobytes())
    else:
        digest.update(json.dumps(kwargs or {}, sort_keys=True, default=str).encode())
    return digest.hexdigest()
