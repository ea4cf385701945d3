"""Trains the classifiers that Quire ships for the semantic router, from router_texts.toml.

    python tools/train_router_classifiers.py all-MiniLM-L6-v2

writes quire/semantic/classifiers/reasoning.safetensors and domain.safetensors. For the reasoning classifier, all texts
of a template are either held out or not, and for the domains, all texts about a topic. So the accuracy is that for new
templates and topics. The name of the model's folder is recorded in the files.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE.parent / "quire" / "semantic" / "classifiers"
COPIES = 6  # of each template, with other words


def reasoning(texts: dict[str, Any], source: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield (text, label, group)."""
    for label in ("reason", "direct"):
        for template in texts[label]:
            copies = COPIES if "{" in template else 1
            for _ in range(copies):
                first, second = source.sample(texts["fill"], 2)
                numbers = {"n": source.randint(2, 12), "m": source.randint(13, 60)}
                text = template.replace("{a}", first).replace("{b}", second)
                for name, number in numbers.items():
                    text = text.replace(f"{{{name}}}", str(number))
                yield text, label, template


def domain(texts: dict[str, Any], source: random.Random) -> Iterator[tuple[str, str, str]]:
    for label, topics in texts.items():
        if label == "questions":
            continue
        for topic in topics:
            for question in source.sample(texts["questions"], COPIES):
                other = source.choice([other for other in topics if other != topic])
                yield question.replace("{a}", topic).replace("{b}", other), label, topic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the embedding model")
    model = parser.parse_args().model
    texts = tomllib.loads((HERE / "router_texts.toml").read_text())
    OUT.mkdir(exist_ok=True)
    for name, generate in (("reasoning", reasoning), ("domain", domain)):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for text, label, group in generate(texts[name], random.Random(0)):
                file.write(json.dumps({"text": text, "label": label, "group": group}) + "\n")
            file.flush()
            command = [sys.executable, "-m", "quire", "route", "train", file.name, "--embedding", model]
            print(f"{name}:", flush=True)
            subprocess.run([*command, "--out", str(OUT / f"{name}.safetensors")], check=True)


if __name__ == "__main__":
    main()
