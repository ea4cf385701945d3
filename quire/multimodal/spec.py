"""The non-text inputs of a model: plain data from which towers and preprocessing are created."""

import re
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
    encoder). config: the checkpoint's whole config. levels: the decoder layers to whose results further features of the
    encoder are added, see StepMedia. two_way: whether the tokens of an image attend to each other in both directions.
    encoder: of texts. names: patterns and replacements that turn the names of the encoder's tensors into those of the
    checkpoint. mark: the token that embeddings replace, if the config does not have its id. directory: of the
    checkpoint, once it is known. preprocessing: of the module quire.multimodal.families.PREPROCESSING if that is
    another one.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    levels: tuple[int, ...] = ()
    two_way: bool = False
    encoder: "DecoderSpec | None" = None
    names: tuple[tuple[str, str], ...] = ()
    mark: str = ""
    directory: Path = field(default=Path(), compare=False)
    preprocessing: str = ""

    @property
    def own_preprocessing(self) -> bool:
        """Whether items are preprocessed by Quire, and not by transformers."""
        return bool(self.preprocessing) or self.family != "transformers"

    def name_of(self, tensor: str) -> str:
        """Return the checkpoint's name of a tensor of the encoder."""
        for pattern, replacement in self.names:
            tensor = re.sub(pattern, replacement, tensor)
        return tensor
