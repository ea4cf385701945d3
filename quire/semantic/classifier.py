"""A classifier of texts: multinomial logistic regression over their embeddings, stored as safetensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from quire.config.engine import ConfigError
from quire.messages.errors import error_text

_SHIPPED = Path(__file__).parent / "classifiers"


@dataclass(frozen=True, eq=False)
class Classifier:
    """weight: [labels, width]. bias: [labels]. about: what the file says of the embedding model and the accuracy."""

    labels: tuple[str, ...]
    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    about: Mapping[str, str]

    @classmethod
    def read(cls, file: str) -> Self:
        """file: a path, or the name of a classifier that Quire ships. Raises ConfigError."""
        shipped = _SHIPPED / f"{file}.safetensors"
        path = shipped if "/" not in file and shipped.is_file() else Path(file)
        try:
            with safetensors.safe_open(path, framework="numpy") as opened:
                about = opened.metadata() or {}
                weight, bias = opened.get_tensor("weight"), opened.get_tensor("bias")
            labels = tuple(json.loads(about["labels"]))
        except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} is not a classifier: {error_text(error)}") from error
        fits = weight.ndim == 2 and bias.shape == weight.shape[:1] == (len(labels),)
        if not (fits and all(isinstance(label, str) for label in labels)):
            raise ConfigError(f"{path} is not a classifier: its tensors do not fit its {len(labels)} labels")
        return cls(labels, weight.astype(np.float32), bias.astype(np.float32), about)

    def write(self, path: Path) -> None:
        tensors = {"weight": self.weight, "bias": self.bias}
        about = {**self.about, "labels": json.dumps(self.labels)}
        path.write_bytes(safetensors.numpy.save(tensors, about))

    def probabilities(self, vector: npt.NDArray[np.float32]) -> dict[str, float]:
        """vector: a normalized embedding, [width]."""
        logits = self.weight @ vector + self.bias
        powers = np.exp(logits - logits.max())
        return dict(zip(self.labels, (powers / powers.sum()).tolist(), strict=True))
