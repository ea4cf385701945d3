"""Records what one version of transformers writes with `save_pretrained`: saved_checkpoints/transformers-VERSION.json.

For every variant of `support.checkpoints` that this version can express: config.json, and the name and shape of each
tensor in the file format that it writes by default. Also the files of a tokenizer with a chat template. Quire must read
all of them (`tests/models/test_saved_by_transformers.py`). Run it in an environment of its own, with the version to be
recorded, torch, safetensors and pytest: python tests/data/record_saved_checkpoints.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.checkpoints import ALL_VARIANTS, BASE  # noqa: E402
from support.layouts import before_transformers_5  # noqa: E402
from support.saved_checkpoints import fold, save_tokenizer, write_record  # noqa: E402

# Fields of the hub's checkpoints that the config classes keep, and once did not declare.
UNDECLARED = {"qwen3_moe": {"head_dim"}, "glm4_moe": {"head_dim"}, "gpt_oss": {"swiglu_limit"}}
LEFT_OUT = {("5.0.0", "phimoe")}  # it saves names of tensors that no other version has


def arguments(
    kind: str, differences: dict[str, Any], writing: dict[str, Any], known: set[str]
) -> dict[str, Any] | None:
    """The arguments of this version's config class; None if it does not have all of them."""
    rotary = differences.get("rope_parameters", {}).values()
    bases = {parameters["rope_theta"] for parameters in rotary if isinstance(parameters, dict)}
    if "rope_parameters" not in known and "rope_local_base_freq" not in known and len(bases) > 1:
        return None
    base = {name: value for name, value in BASE.items() if name in known}
    config = {"model_type": kind, **base, **deepcopy(differences)}
    if "rope_parameters" not in known:
        before_transformers_5(config)
    if "num_experts" in known and "num_local_experts" in config and "num_local_experts" not in known:
        config["num_experts"] = config.pop("num_local_experts")
    config |= {name: value for name, value in writing.get("adds", {}).items() if name in known}
    config = {name: value for name, value in config.items() if name in known or name not in writing.get("without", ())}
    del config["model_type"]
    return config if config.keys() <= known else None


def shapes(directory: Path) -> tuple[str, dict[str, list[int]]]:
    """The name of the weights file, and the shapes of its tensors."""
    [file] = [*directory.glob("model.safetensors"), *directory.glob("pytorch_model.bin")]
    if file.suffix == ".bin":
        return file.name, {name: list(t.shape) for name, t in torch.load(file, weights_only=True).items()}
    with safe_open(file, framework="pt") as tensors:
        return file.name, {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118


def saved(kind: str, differences: dict[str, Any], writing: dict[str, Any]) -> dict[str, Any] | None:
    try:
        config_class = type(transformers.AutoConfig.for_model(kind))
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except (KeyError, ValueError):
        return None  # the family is younger than this version
    known = {*config_class().to_dict(), *config_class.attribute_map, "tie_word_embeddings", *UNDECLARED.get(kind, ())}
    config = arguments(kind, differences, writing, known)
    if config is None:
        return None
    try:
        model = model_class(config_class(**{"pad_token_id": None, **deepcopy(config)}))
    except Exception as error:
        print(f"this version cannot build {kind} with {differences}: {error!r}")
        return None
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        file, tensors = shapes(Path(name))
        written = json.loads((Path(name) / "config.json").read_text())
    if not config.get("rope_parameters", {}).items() <= written.get("rope_parameters", {}).items():
        print(f"this version does not keep the rope_parameters of {kind} with {differences}")
        return None
    return {"config": written, "file": file, "tensors": fold(tensors)}


def tokenizer_files() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(Path(name))
        return {file.name: file.read_text() for file in sorted(Path(name).iterdir())}


def main() -> None:
    variants = {n: v for n, v in ALL_VARIANTS.items() if (transformers.__version__, v[0]) not in LEFT_OUT}
    records = {name: record for name, variant in variants.items() if (record := saved(*variant))}
    path = write_record(transformers.__version__, {"variants": records, "tokenizer": tokenizer_files()})
    print(f"{path.name}: {len(records)} of {len(ALL_VARIANTS)} variants")


if __name__ == "__main__":
    main()
