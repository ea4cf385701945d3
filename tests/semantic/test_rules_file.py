"""The file of rules: what is read, and what its mistakes are called."""

from pathlib import Path

import pytest

from quire.config.engine import ConfigError
from quire.semantic.rules import Rules

WHOLE = """
models = ["auto", "*"]
default_model = "small"

[embedding]
model = "all-MiniLM-L6-v2"
options = { threads = 1 }

[[classifier]]
name = "reasoning"
file = "reasoning"

[cache]
enabled = true
similarity = 0.9

[[rule]]
name = "hard"
when = { classifier = "reasoning", labels = ["reason"], probability = 0.7 }
then = { model = "large", reasoning = true, sampling = { temperature = 0.6 } }

[[rule]]
name = "rest"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path):
    rules = Rules.read(write(tmp_path, WHOLE))
    hard, rest = rules.rule
    assert hard.when.labels == ("reason",)
    assert hard.then.model == "large"
    assert hard.then.sampling.temperature == 0.6
    assert rest.then.model is None
    assert rules.needs_embeddings
    assert rules.apply_to("anything")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 5", r"Expected `array`, got `int` - at `\$\.rule`"),
        ('[[rule]]\nname = "a"\nwhen = { similar = ["b"] }', r"unknown field `similar` - at `\$\.rule\[0\]\.when`"),
        ('[[rule]]\nname = "a"\nwhen = { similarity = 2.0 }', r"similarity must be between 0 and 1, got 2\.0 - at"),
        ('[[rule]]\nname = "a"\nwhen = { similar_to = ["b"] }', r"need a model in \[embedding\]"),
        ('[[rule]]\nname = "a"\nwhen = { classifier = "c", labels = ["d"] }', r"rule a: there is no classifier 'c'"),
        ('[[rule]]\nname = "a"\nwhen = { classifier = "c" }', "classifier and labels are given together"),
        ('[[rule]]\nname = "a"\n[[rule]]\nname = "a"', "two rules have the name 'a'"),
        ('[[rule]]\nname = "a b"', "name must consist of"),
        ('[[rule]]\nname = "a"\nwhen = { api_keys_sha256 = ["secret"] }', "must contain SHA-256 hashes"),
        ('[[rule]]\nname = "a"\nwhen = { keywords = [""] }', "keywords contains an empty text"),
        (
            '[[rule]]\nname = "a"\nthen = { reasoning = true, reasoning_effort = "low" }',
            "reasoning and reasoning_effort cannot be given together",
        ),
        ('[[rule]]\nname = "a"\nthen = { sampling = { temperature = "hot" } }', r"got `str` - at .*\.temperature`"),
        ("[cache]\nenabled = true\nttl = 0", "ttl must be greater than 0"),
        ("models = [", "Invalid value"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        Rules.read(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        Rules.read(tmp_path / "rules.toml")
