"""Records of what versions of transformers save, made by tests/data/record_saved_checkpoints.py.

The tensors' names are kept short: {"layers.{0,1}.experts.{0,1}.w": [4, 6]} stands for four tensors of that shape.
"""

from __future__ import annotations

import json
import re
from itertools import chain, product
from pathlib import Path
from typing import Any

from support.checkpoints import SPECIAL, byte_level_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ eos_token }}"
RECORDS = Path(__file__).parents[1] / "data" / "saved_checkpoints"
VERSIONS = [file.stem.removeprefix("transformers-") for file in sorted(RECORDS.glob("transformers-*.json"))]


def read_record(version: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"transformers-{version}.json").read_text())
    return record


def write_record(version: str, record: dict[str, Any]) -> Path:
    """One line for each variant, so that a diff shows what changed."""
    path = RECORDS / f"transformers-{version}.json"
    path.parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(saved)}" for name, saved in record["variants"].items()]
    variants = "{\n" + ",\n".join(lines) + "\n}"
    path.write_text(f'{{"variants": {variants},\n"tokenizer": {json.dumps(record["tokenizer"])}}}\n')
    return path


def fold(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Shapes by short names. Names are shortened only if all combinations of their numbers occur, with one shape."""
    groups: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for name, shape in shapes.items():
        groups.setdefault((re.sub(r"\d+(?=\.)", "{}", name), *map(str, shape)), {})[name] = shape
    folded = {}
    for (template, *_), members in groups.items():
        numbers = zip(*(re.findall(r"\d+(?=\.)", name) for name in members), strict=True)
        short = template.format(*("{" + ",".join(dict.fromkeys(found)) + "}" for found in numbers))
        whole = unfold({short: []}).keys() == members.keys()
        folded.update({short: next(iter(members.values()))} if whole else members)
    return folded


def unfold(folded: dict[str, list[int]]) -> dict[str, list[int]]:
    """Shapes by the full names of the tensors."""
    shapes = {}
    for short, shape in folded.items():
        texts, choices = re.split(r"{[\d,]+}", short), re.findall(r"{([\d,]+)}", short)
        for numbers in product(*(choice.split(",") for choice in choices)):
            name = "".join(chain.from_iterable(zip(texts, (*numbers, ""), strict=True)))
            shapes[name] = shape
    return shapes


def save_tokenizer(directory: Path) -> None:
    """The files of a tokenizer with special tokens and a chat template, as transformers writes them."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
