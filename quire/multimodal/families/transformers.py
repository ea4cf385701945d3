"""Models whose preprocessing is transformers' own (quire/models/transformers_backend/preprocessing.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.messages.errors import error_text
from quire.multimodal.families.base import Config, Family, Kind, Placed, Prepared
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array
from quire.multimodal.through_transformers import Prepared as Remote

AXES = 3  # of rotary positions: time, height and width


class Items(Family):
    def __init__(self, directory: Path, config: Config, given: Config) -> None:
        """given: the user's settings of the processor. Raises ValueError if transformers' processor cannot be used."""
        self._remote = Remote("preprocessing:load", (str(directory), dict(config), dict(given)))
        kinds, self.sample_rate = self._remote.call("preprocessing:facts")
        self.kinds = {modality: Kind(*kind) for modality, kind in kinds.items()}

    def image(self, image: Image.Image) -> Prepared:
        return self._prepared("image", image.size, image.tobytes())

    def audio(self, samples: Array) -> Prepared:
        return self._prepared("audio", samples.tobytes())

    def _prepared(self, modality: str, *item: Any) -> Prepared:
        try:
            made = self._remote.call(f"preprocessing:{modality}", *item)
        except ValueError as error:
            raise MediaError(f"transformers' processor cannot use it: {error_text(error)}") from error
        tensors = {
            name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in made["tensors"].items()
        }
        rotary = None
        if (positions := made["rotary"]) is not None:
            rotary = np.frombuffer(positions, np.int32).reshape(AXES, -1)
        return Prepared(
            tensors, made["text"], made["num_embeds"], rotary=rotary, lead=made["lead"], numbered=made["numbered"]
        )

    def rotary_positions(self, token_ids: list[int], placed: Sequence[Placed]) -> Array | None:
        items = [
            (found.positions[0] - found.item.lead, found.item.rotary)
            for found in placed
            if found.item.rotary is not None
        ]
        return composed(len(token_ids), items) if items else None


def composed(count: int, items: Sequence[tuple[int, Array]]) -> Array:
    """Return the rotary positions [axes, count] of a prompt. items: the first token with a position in Prepared.rotary,
    and these positions. Text after an item continues after the largest of its positions."""
    parts = list[Array]()
    token = 0
    position = 0
    for start, rotary in items:
        parts.append(np.tile(np.arange(position, position + start - token), (AXES, 1)))
        parts.append(np.maximum(rotary + position + start - token, 0))
        position = int(parts[-1].max()) + 1
        token = start + rotary.shape[1]
    parts.append(np.tile(np.arange(position, position + count - token), (AXES, 1)))
    whole: Array = np.concatenate(parts, 1).astype(np.int32)
    return whole
