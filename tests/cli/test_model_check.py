"""`quire model check`: its verdict is that of an engine, from a config and the names of tensors only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quire.checkpoints.hub import bundled_model
from quire.checkpoints.index import known_tensors
from quire.cli.main import main
from quire.config.engine import ModelConfig
from quire.models.description import describe
from quire.models.fit import TensorFit, fit_of
from quire.models.nearest import nearest
from quire.models.registry import ARCHITECTURES
from support.checkpoints import ALL_VARIANTS, write_checkpoint
from support.engines import generate, make_llm, tokens_of
from support.gguf_files import write_gguf
from support.hub import Hub, Machine
from support.quantized import FORMATS, FURTHER, write_quantized

EVEN = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
ALWAYS = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(bundled_model(), tmp_path / "model"))


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def keep_index_only(folder: Path, more: tuple[str, ...] = ()) -> None:
    """Replace the weights by an index that lists them."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        names = [*tensors.keys(), *more]
    index = {
        "metadata": {"total_size": 123_000_000},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


def check(model: Path | str, capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["model", "check", str(model), "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fit(folder: Path) -> TensorFit:
    tensors = known_tensors(folder)
    assert tensors is not None
    return fit_of(describe(folder, ModelConfig()), tensors)


def test_a_native_model_is_described_with_its_memory(capsys):
    found = check("quire-demo", capsys, 0)
    assert (found["runs"], found["problems"], found["unread_fields"]) == ("native", [], [])
    assert found["tensors"]["count"] == 57
    assert main(["show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_1000_tokens"] == {
        "auto": 1000 * shown["kv_bytes_per_token"],
        "fp8": 500 * shown["kv_bytes_per_token"],
    }
    assert list(found["weight_bytes"].values()) == [estimate["memory"] for estimate in shown["estimates"]]
    assert main(["model", "check"]) == 0
    text = capsys.readouterr().out
    for part in ("natively", "57, which are those that the family expects", "To use it here: quire serve quire-demo\n"):
        assert part in text


def test_the_config_and_the_index_are_enough(folder, capsys):
    keep_index_only(folder)
    found = check(folder, capsys, 0)
    assert (found["runs"], found["tensors"]["count"], found["file_bytes"]) == ("native", 57, 123_000_000)
    (folder / "model.safetensors.index.json").unlink()
    found = check(folder, capsys, 0)
    assert (found["runs"], found["tensors"]) == ("native", None)


def test_tensors_that_do_not_fit_are_named(folder, capsys):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].clone()
    save_file(tensors, file)
    found = check(folder, capsys, 1)
    assert found["runs"] is None
    assert found["problems"] == [
        "1 tensors are missing: model.layers.1.mlp.up_proj.weight",
        "1 tensors are unknown to the family: model.layers.0.extra.weight",
        "1 tensors have other shapes than config.json asks for: model.norm.weight has shape [8], not [256]",
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be an integer from 1 to 10,000, got 'many'"),
        ({"vocab_size": None}, "config.json of a Qwen3ForCausalLM: vocab_size cannot be None"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling: rope_type cannot be 'spiral'"),
        ({"quantization_config": {"quant_method": "quip"}}, "checkpoints quantized with 'quip' are not supported"),
    ],
)
def test_an_unsupported_field_is_named(folder, capsys, fields, problem):
    edit(folder, **fields)
    found = check(folder, capsys, 1)
    assert problem in found["problems"][0]


def test_an_unknown_architecture_gets_its_nearest_family(folder, capsys):
    expected = tokens_of(generate(make_llm(folder, dtype="bfloat16"), [[5, 6, 7]]))
    edit(folder, architectures=["BrandNewForCausalLM"], model_type="brandnew", spirals=3)
    keep_index_only(folder, more=("model.spiral.weight",))
    edit(folder, quantization_config={"quant_method": "quip"})
    found = check(folder, capsys, 1)
    assert found["problems"] == [
        "architecture BrandNewForCausalLM is not supported",
        "checkpoints quantized with 'quip' are not supported: supported: "
        + found["problems"][1].split(": supported: ")[1],
    ]
    shutil.rmtree(folder)
    shutil.copytree(bundled_model(), folder)
    edit(folder, architectures=["BrandNewForCausalLM"], model_type="brandnew", spirals=3)
    near = check(folder, capsys, 1)["nearest"][0]
    assert (near["architecture"], near["unread"], near["tensors"]["missing"]) == ("Qwen3ForCausalLM", ["spirals"], [])
    main(["model", "check", str(folder)])
    assert "Qwen3ForCausalLM  " in (text := capsys.readouterr().out)
    assert "does not read spirals; 100% of the tensor names are the same" in text
    edit(folder, spirals=None)
    [option] = check(folder, capsys, 1)["options"]
    assert option["text"] == """--hf-overrides '{"architectures": ["Qwen3ForCausalLM"]}'"""
    llm = make_llm(folder, dtype="bfloat16", hf_overrides={"architectures": ["Qwen3ForCausalLM"]})
    assert tokens_of(generate(llm, [[5, 6, 7]])) == expected


def test_transformers_code_is_named(tmp_path, capsys):
    write_checkpoint(tmp_path, "helium", {"head_dim": 16, "num_attention_heads": 4})
    found = check(tmp_path, capsys, 0)
    assert (found["runs"], found["architecture"]) == ("transformers", "HeliumForCausalLM")
    main(["model", "check", str(tmp_path)])
    assert "through transformers' code" in capsys.readouterr().out


def test_a_gguf_file_is_checked_by_its_header(checkpoints, tmp_path, capsys):
    file = write_gguf(checkpoints.path("llama"), tmp_path / "model.gguf")
    found = check(file, capsys, 0)
    assert (found["runs"], found["tensors"]["unexpected"]) == ("native", [])


@pytest.mark.slow  # it runs commands
def test_only_small_files_are_fetched_from_the_hub(folder, tmp_path):
    repositories = tmp_path / "repositories"
    shutil.copytree(folder, repositories / "tiny/single")
    keep_index_only(folder)
    shutil.copytree(folder, repositories / "tiny/indexed")
    (repositories / "tiny/indexed/model-00001-of-00001.safetensors").write_text("weights")
    with Hub(repositories) as hub:
        machine = Machine(hub, tmp_path / "home")
        found = json.loads(machine.says("model check tiny/single --json"))
        assert (found["runs"], found["tensors"]["count"]) == ("native", 57)
        assert sum(hub.sent.values()) <= 1 << 18
        hub.requests.clear()
        found = json.loads(machine.says("model check tiny/indexed --json"))
        assert found["tensors"]["count"] == 57
        assert hub.fetched() == {"config.json", "tokenizer_config.json", "model.safetensors.index.json"}
        assert not machine.cache.exists()


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.nightly]) for name in ALL_VARIANTS]
)
def test_the_tensors_of_every_family_fit(checkpoints, variant):
    assert fit(checkpoints.path(variant)).is_complete


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*FORMATS, *FURTHER])
def test_the_tensors_of_every_format_fit(tmp_path, name):
    source = write_checkpoint(tmp_path / "source", "llama", EVEN)
    quantized, _ = write_quantized(source, tmp_path, {**FORMATS, **FURTHER}[name])
    assert fit(quantized).is_complete


def test_a_renamed_family_is_among_the_nearest():
    """Of transformers' default configs with a new name, at least nine in ten find their own family first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for model_type in (
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "deepseek_v3",
        "mamba2",
        "gpt_oss",
        "olmo2",
        "jamba",
        "phi3",
    ):
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        config = CONFIG_MAPPING[model_type]().to_dict()
        renamed = {**config, "architectures": [name.replace("ForCausalLM", "V9ForCausalLM")]}
        found.append(ARCHITECTURES[nearest(renamed, 1)[0]] == ARCHITECTURES[name])
    assert sum(found) >= 9
