"""Records the names of the architectures in vLLM's registry, and nothing else of it.

    python tools/vllm_architectures.py VERSION REGISTRY

REGISTRY is vllm/model_executor/models/registry.py of vLLM's source distribution, which is read and never imported.
tests/models/test_every_family.py compares Quire with the result, tests/data/vllm_architectures.json.
"""

import argparse
import ast
import json
from pathlib import Path

OUT = Path(__file__).parents[1] / "tests" / "data" / "vllm_architectures.json"
KINDS = {  # the registry's tables
    "_TEXT_GENERATION_MODELS": "text",
    "_MULTIMODAL_MODELS": "multimodal",
    "_EMBEDDING_MODELS": "embedding",
    "_LATE_INTERACTION_MODELS": "late interaction",
    "_REWARD_MODELS": "reward",
    "_TOKEN_CLASSIFICATION_MODELS": "token classification",
    "_SEQUENCE_CLASSIFICATION_MODELS": "sequence classification",
    "_TRANSFORMERS_SUPPORTED_MODELS": "through transformers",
    "_OOT_SUPPORTED_MODELS": "plugin",
    "_PREVIOUSLY_SUPPORTED_MODELS": "removed",
}


def architectures(registry: str) -> dict[str, list[str]]:
    """The names in each of the tables."""
    tables: dict[str, ast.Dict] = {}
    for statement in ast.parse(registry).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        table = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and target.id in KINDS and isinstance(table, ast.Dict):
            tables[target.id] = table
    return {kind: sorted(_names(tables[table], tables)) for table, kind in KINDS.items()}


def _names(table: ast.Dict, tables: dict[str, ast.Dict]) -> set[str]:
    """The keys of a table. It may include the entries of another one whose class has a certain name."""
    names = {str(key.value) for key in table.keys if isinstance(key, ast.Constant)}
    for key, included in zip(table.keys, table.values, strict=True):
        if key is not None or not isinstance(included, ast.DictComp):
            continue
        parts = list(ast.walk(included))
        other = next(part.id for part in parts if isinstance(part, ast.Name) and part.id in tables)
        wanted = next(part.value for part in parts if isinstance(part, ast.Constant))
        names |= {
            str(name.value)
            for name, entry in zip(tables[other].keys, tables[other].values, strict=True)
            if isinstance(name, ast.Constant) and isinstance(entry, ast.Tuple) and _class_of(entry) == wanted
        }
    return names


def _class_of(entry: ast.Tuple) -> object:
    """The second part of an entry: a module and a class."""
    return getattr(entry.elts[1], "value", None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("version")
    parser.add_argument("registry", type=Path)
    arguments = parser.parse_args()
    made = {"version": arguments.version, **architectures(arguments.registry.read_text(encoding="utf-8"))}
    OUT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for kind, names in made.items():
        print(kind, names if isinstance(names, str) else len(names))


if __name__ == "__main__":
    main()
