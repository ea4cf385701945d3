"""`quire plan`: the command, from flags to tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main

TRAFFIC = "rate=5,input=200,output=20,requests=40"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
def test_a_plan_needs_only_the_config(model, capsys):
    flags = ["--layout", "tp=2", "--layout", "dp=2", "--slo", "ttft=1s,itl=50ms", "--price", "2.5"]
    assert main(["plan", "--model", model, "--gpus", "H100x2", "--traffic", TRAFFIC, *flags]) == 0
    out = capsys.readouterr().out
    for piece in (
        "as it is: weights",
        "int4: weights",
        "tp 2",
        "dp 2",
        "TTFT p50",
        "The highest load",
        "$",
        "quire serve",
    ):
        assert piece in out, piece


def test_a_plan_as_data_and_as_a_plot(model, capsys, tmp_path: Path):
    plot = tmp_path / "plan.png"
    flags = ["--json", "--no-search", "--plot", str(plot), "--quantization", "int8", "--kv-cache-dtype", "fp8"]
    assert main(["plan", "--model", model, "--gpus", "A100", "--traffic", TRAFFIC, *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    (layout,) = data["layouts"]
    assert layout["fits"]
    assert layout["breaking"] is None
    assert data["options"]["max_model_len"] == 220
    assert data["options"]["kv_element_bytes"] == 1
    assert 7e9 < layout["memory"]["weights"] < 10e9
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_known_devices_are_listed(capsys):
    assert main(["plan", "--gpus", "?"]) == 0
    assert "NVIDIA H100 SXM 80 GB" in capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--traffic rate=1,input=1,output=1", "give either --gpus"),
        ("--gpus H100", "--traffic is missing"),
        ("--gpus V100 --traffic rate=1,input=1,output=1", "--gpus V100 must be a device and a number of them"),
        ("--gpus H100 --traffic nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("--gpus H100 --traffic rate=1,input=1,output=1 --slo ttft=5", "--slo ttft=5"),
        ("--gpus H100 --traffic rate=1,input=1,output=1 --layout tp=2", "--layout needs 2 devices"),
        ("--gpus H100 --traffic rate=1,input=1,output=1 --price -1", "--price must not be negative"),
        ("--gpus H100 --traffic rate=1,input=9999,output=1", "as a request of the traffic needs, is more than the"),
        ("--gpus H100 --traffic rate=1,input=50,output=1 --max-model-len 20", "--max-model-len 20 is too small"),
        ("--gpus H100 --traffic rate=1,input=1,output=1 --quantization fp8", "--quantization fp8 is not known"),
        ("--fit /nowhere --traffic rate=1,input=1,output=1", "No such file"),
        ("measure", "--output is missing"),
        ("measure --output x --seconds 0", "--seconds must be above 0"),
    ],
)
def test_wrong_flags_are_errors_of_one_line(flags, message, capsys):
    assert main(["plan", *flags.split()]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_needs_a_model_that_generates(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["UnknownForCausalLM"]}')
    assert main(["plan", "--model", str(tmp_path), "--gpus", "L4", "--traffic", TRAFFIC]) == 1
    assert "UnknownForCausalLM is not supported" in capsys.readouterr().err


def test_models_with_recurrent_layers_are_refused(checkpoints, capsys):
    path = str(checkpoints.path("mamba2"))
    assert main(["plan", "--model", path, "--gpus", "L4", "--traffic", TRAFFIC]) == 1
    assert "recurrent layers" in capsys.readouterr().err


def test_steps_are_measured_and_simulated(tmp_path, capsys):
    """On the bundled model."""
    fit = str(tmp_path / "fit.json")
    assert main(["plan", "measure", "--output", fit, "--seconds", "0.1", "--max-num-seqs", "4"]) == 0
    assert "the fitted times are within" in capsys.readouterr().out
    assert main(["plan", "--fit", fit, "--traffic", "rate=1,input=50,output=10,requests=20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["options"]["max_num_seqs"] == 4
    assert 1e-5 < data["layouts"][0]["load"]["itl"]["p50"] < 1
    assert main(["plan", "--fit", fit, "--traffic", TRAFFIC, "--quantization", "int8"]) == 1
    assert "was measured with another model" in capsys.readouterr().err
