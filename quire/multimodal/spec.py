"""What a model takes besides text: plain data, which towers and preprocessing are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.spec import DecoderSpec


@dataclass(frozen=True)
class MediaSpec:
    """What a model sees or hears besides text, or what text its encoder reads.

    family: of the modules quire.multimodal.families.FAMILY (preprocessing) and quire.models.towers.FAMILY (the
    encoder). config: the checkpoint's whole config. levels: for how many layers the encoder has features of their own,
    see StepMedia. two_way: whether the tokens of a picture see each other in both directions. encoder: of texts.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    levels: int = 0
    two_way: bool = False
    encoder: "DecoderSpec | None" = None
