"""Trains a classifier on labelled texts: `quire route train`."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.config.engine import ConfigError
from quire.messages.errors import error_text
from quire.semantic.classifier import Classifier

HELD_OUT = 5  # one of so many examples is held out
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)  # of squared weights; the best on the held-out part is used
MAX_EXAMPLES = 200_000


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the training file. group: examples of the same group are either all held out or not, such as variants
    of a text."""

    text: str
    label: str
    group: str | None = None


class Result(NamedTuple):
    """classifier: trained on all examples. accuracy: of one trained without the held-out ones, on them. confusion:
    [true label, predicted label], counts of held-out examples."""

    classifier: Classifier
    accuracy: float
    confusion: npt.NDArray[np.int64]


def read_examples(path: Path) -> list[Example]:
    """Read lines of JSON with `text` and `label`. Raises ConfigError with the line's number."""
    examples = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    examples.append(msgspec.json.decode(line, type=Example))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number}: {error_text(error)}") from error
                if len(examples) > MAX_EXAMPLES:
                    raise ConfigError(f"{path} has more than {MAX_EXAMPLES} examples")
    except OSError as error:
        raise ConfigError(f"{path}: {error_text(error)}") from error
    if len({example.label for example in examples}) < 2:
        raise ConfigError(f"{path} needs examples with at least two labels")
    return examples


def train(examples: Sequence[Example], vectors: npt.NDArray[np.float32], model: str) -> Result:
    """vectors: the examples' normalized embeddings, [examples, width]. model: the name of the embedding model."""
    labels = tuple(sorted({example.label for example in examples}))
    numbers = np.array([labels.index(example.label) for example in examples])
    held_out = np.array([_is_held_out(example.group or example.text) for example in examples])
    if not held_out.any() or held_out.all():
        held_out = np.arange(len(examples)) % HELD_OUT == 0
    best_accuracy, best_penalty, confusion = -1.0, PENALTIES[0], np.zeros((0, 0), np.int64)
    for penalty in PENALTIES:
        weight, bias = _fit(vectors[~held_out], numbers[~held_out], len(labels), penalty)
        predicted = (vectors[held_out] @ weight.T + bias).argmax(1)
        accuracy = float((predicted == numbers[held_out]).mean())
        if accuracy > best_accuracy:
            best_accuracy, best_penalty = accuracy, penalty
            confusion = np.zeros((len(labels), len(labels)), np.int64)
            np.add.at(confusion, (numbers[held_out], predicted), 1)
    weight, bias = _fit(vectors, numbers, len(labels), best_penalty)
    about = {
        "model": model.rstrip("/").rpartition("/")[2],
        "examples": str(len(examples)),
        "held_out_examples": str(int(held_out.sum())),
        "held_out_accuracy": f"{best_accuracy:.4f}",
    }
    return Result(Classifier(labels, weight, bias, about), best_accuracy, confusion)


def _is_held_out(group: str) -> bool:
    """The same text is always on the same side, so copies of it cannot be on both."""
    return sha256(group.encode()).digest()[0] % HELD_OUT == 0


def _fit(
    vectors: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64], labels: int, penalty: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Minimize the mean cross-entropy plus `penalty` times the sum of squared weights. Returns ([labels, width],
    [labels])."""
    inputs, targets = torch.from_numpy(vectors), torch.from_numpy(numbers)
    weight = torch.zeros(labels, vectors.shape[1], requires_grad=True)
    bias = torch.zeros(labels, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(inputs @ weight.T + bias, targets) + penalty * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach().numpy(), bias.detach().numpy()
