"""The non-text inputs of a model: plain data from which towers and preprocessing are created."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.spec import DecoderSpec


@dataclass(frozen=True)
class MediaSpec:
    """The image or audio inputs of a model, or the texts that its encoder reads.

    family: of the modules quire.multimodal.families.FAMILY (preprocessing) and quire.models.towers.FAMILY (the
    encoder). config: the checkpoint's whole config. levels: the decoder layers to whose results further
    features of the encoder are added, see StepMedia. two_way: whether the tokens of an image attend to each other in
    both directions. encoder: of texts. directory: of the checkpoint, once it is known.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    levels: tuple[int, ...] = ()
    two_way: bool = False
    encoder: "DecoderSpec | None" = None
    directory: Path = field(default=Path(), compare=False)
