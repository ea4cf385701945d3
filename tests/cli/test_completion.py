"""`quire completion`: bash completes commands, options, values and models."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.cli.completion import models
from quire.cli.main import main

COMPLETE = """
eval "$(quire completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "$1"
_python_argcomplete quire
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def complete(tmp_path):
    """What bash offers at the end of a line."""
    (tmp_path / "quire").write_text(f'#!/bin/sh\nexec {sys.executable} -m quire "$@"\n')
    (tmp_path / "quire").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HUB_CACHE": str(tmp_path / "hub")}
    (tmp_path / "hub" / "models--some--model").mkdir(parents=True)
    (tmp_path / "weights.gguf").touch()

    def run(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", COMPLETE, "-", line], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        return [word.strip() for word in done.stdout.split("\n") if word.strip()]

    return run


def test_bash_completes_every_part_of_a_line(complete):
    assert complete("quire ser") == ["serve"]
    assert "--max-model-len" in complete("quire serve --max-")
    assert set(complete("quire serve --dtype flo")) == {"float16", "float32", "float"}
    assert complete("quire serve some/m") == ["some/model"]
    assert complete("quire generate hello --model wei") == ["weights.gguf"]


def test_models_are_completed_from_short_names_and_the_bundled_one():
    assert "quire-demo" in models("quire")
    assert "qwen3:0.6b" in models("qwen3")
    assert all(name.startswith("qwen3") for name in models("qwen3"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "quire" in capsys.readouterr().out


def test_quire_alone_prints_help(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: quire")
    assert "serve" in text
    assert "doctor" in text


def test_a_wrong_sampling_option_is_found_before_torch_is_imported():
    code = "import sys; from quire.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "generate", "hi", "--max-tokens", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "quire: error: --max-tokens must be at least 1, got -1.\n"
    assert done.stdout == "1 False\n"


def test_a_model_file_that_does_not_exist(capsys):
    assert main(["generate", "hi", "--model", "./nothing.gguf"]) == 1
    assert capsys.readouterr().err == "quire: error: model './nothing.gguf': no such file or directory\n"
