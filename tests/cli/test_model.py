"""The model is given in the same ways to every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.cli.main import build_parser, main

COMMANDS = ["serve", "chat", "bench throughput", "bench latency", "bench serve", "bench claims"]
BUNDLED = str(Path(quire.__file__).parent / "demo" / "model")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_the_first_argument_or_a_flag(command):
    words = command.split()
    for line in (
        ["a/b"],
        ["--model", "a/b"],
        ["--model=a/b"],
        ["--log-level", "info", "a/b"],
        ["a/b", "--model", "a/b"],
    ):
        assert build_parser().parse_args([*words, *line]).model == "a/b"
    assert build_parser().parse_args(words).model is None


@pytest.mark.parametrize("command", COMMANDS)
def test_two_different_models_are_an_error(command, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([*command.split(), "a/b", "--model", "c/d"])
    assert ended.value.code == 2
    assert "two models are given, 'a/b' and 'c/d'; leave one out" in capsys.readouterr().err


def test_generate_takes_its_prompt_first_and_the_model_as_a_flag(capsys):
    assert main(["generate", "Once upon a time", "--model", BUNDLED, "--max-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_a_prompt_that_is_a_model_is_an_error_that_shows_the_right_command(tmp_path: Path, capsys):
    directory = tmp_path / "my model"
    directory.mkdir()
    weights = directory / "model.safetensors"
    weights.touch()
    gguf = tmp_path / "small.gguf"
    gguf.touch()
    for prompt, model in ((directory, f"'{directory}'"), (weights, f"'{directory}'"), (gguf, str(gguf))):
        assert main(["generate", str(prompt)]) == 1
        assert f'quire generate --model {model} "YOUR PROMPT"' in capsys.readouterr().err
    config = tmp_path / "quire.yaml"
    config.write_text(json.dumps({"model": BUNDLED}))
    assert main(["generate", str(directory), "--config", str(config), "--max-tokens", "1"]) == 0


@pytest.mark.parametrize("prompt", ["x" * 5000, "a\0b", "small.gguf", "..."])
def test_other_prompts_are_no_models(prompt):
    from quire.cli.model import check_prompt

    check_prompt(prompt)


def test_a_prompt_that_cannot_be_run_is_not_shown_before_the_error(capsys):
    assert main(["generate", "word " * 2500]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "leaves no room for output: --max-model-len is 2048" in printed.err
