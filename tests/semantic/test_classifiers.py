"""Classifiers: training, files, and those that Quire ships, with real embeddings."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from quire.cli.main import main
from quire.config.engine import ConfigError
from quire.semantic.classifier import Classifier
from quire.semantic.training import Example, read_examples, train
from support.minilm import minilm


def test_two_clusters_are_told_apart(tmp_path: Path):
    source = np.random.default_rng(0)
    numbers = source.integers(0, 2, 200)
    vectors = (source.normal(size=(200, 8)) * 0.3 + numbers[:, None]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    examples = [Example(text=str(i), label="ab"[number]) for i, number in enumerate(numbers)]
    result = train(examples, vectors, "folder/model")
    assert result.accuracy > 0.9
    assert result.confusion.sum() == int(result.classifier.about["held_out_examples"])
    assert result.classifier.about["model"] == "model"
    result.classifier.write(tmp_path / "c.safetensors")
    again = Classifier.read(str(tmp_path / "c.safetensors"))
    assert again.labels == ("a", "b")
    probabilities = again.probabilities(vectors[0])
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert max(probabilities, key=probabilities.__getitem__) == "ab"[numbers[0]]


def test_examples_of_a_group_stay_together():
    examples = [Example(text=f"{i}", label="ab"[i % 2], group=f"{i % 10}") for i in range(400)]
    vectors = np.eye(10, dtype=np.float32)[[i % 10 for i in range(400)]]
    # A group's vectors are all the same and tell nothing about other groups, so held-out groups are guessed.
    assert train(examples, vectors, "m").accuracy < 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}', "line 1: .*missing required field `label`"),
        ('{"text": "a", "label": "b"}\nnonsense', "line 2: "),
        ('{"text": "a", "label": "b"}\n', "at least two labels"),
    ],
)
def test_mistakes_in_examples_are_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "examples.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_examples(path)


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(ConfigError, match="is not a classifier"):
        Classifier.read(str(path))
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="is not a classifier"):
        Classifier.read(str(path))
    tensors = {"weight": np.zeros((3, 4), np.float32), "bias": np.zeros(3, np.float32)}
    path.write_bytes(safetensors.numpy.save(tensors, {"labels": json.dumps(["a", "b"])}))
    with pytest.raises(ConfigError, match="do not fit its 2 labels"):
        Classifier.read(str(path))


def test_shipped_classifiers_say_what_they_are_for():
    for name, least in (("reasoning", 0.95), ("domain", 0.7)):
        about = Classifier.read(name).about
        assert about["model"] == "all-MiniLM-L6-v2"
        assert float(about["held_out_accuracy"]) > least


def test_the_command_trains_on_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "examples.jsonl"
    animals, sums = ("cat", "dog", "horse", "sparrow", "goat"), ("add", "subtract", "multiply", "divide", "square")
    texts = [(f"Tell me about a {name}, number {i}.", "animals") for name in animals for i in range(4)]
    texts += [(f"Please {name} {i} and five.", "sums") for name in sums for i in range(4)]
    path.write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in texts))
    out = tmp_path / "out.safetensors"
    assert main(["route", "train", str(path), "--embedding", str(minilm()), "--out", str(out)]) == 0
    assert "40 examples; accuracy on held-out ones: 100.0%" in capsys.readouterr().out
    assert Classifier.read(str(out)).labels == ("animals", "sums")
