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
    "_TRANSFORMERS_SUPPORTED_MODELS": "through transformers",
    "_OOT_SUPPORTED_MODELS": "plugin",
    "_PREVIOUSLY_SUPPORTED_MODELS": "removed",
}


def architectures(registry: str) -> dict[str, list[str]]:
    """The names in each of the tables."""
    found: dict[str, list[str]] = {}
    for statement in ast.parse(registry).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        table = getattr(statement, "value", None)
        if isinstance(target, ast.Name) and target.id in KINDS and isinstance(table, ast.Dict):
            found[KINDS[target.id]] = sorted(str(key.value) for key in table.keys if isinstance(key, ast.Constant))
    return found


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
