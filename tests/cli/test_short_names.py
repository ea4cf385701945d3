"""Short names of models stand for repositories on the hub, in every command that takes a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli.flags import engine_options, server_options
from quire.cli.main import build_parser, main
from quire.cli.models.short_names import _families, listed_names, resolve_name, short_name_of, short_names
from quire.config.engine import ServerConfig

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BEGIN, END = "<!-- written by tests/cli/test_short_names.py --write -->\n", "<!-- end -->"


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
        ("Llama3.2:1B", "meta-llama/Llama-3.2-1B-Instruct"),
        ("llama3.2", "meta-llama/Llama-3.2-3B-Instruct"),
        ("llama3.2:latest", "meta-llama/Llama-3.2-3B-Instruct"),
        ("quire-demo", None),
        (None, None),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/some/folder", "/some/folder"),
        ("./folder", "./folder"),
        ("small.gguf", "small.gguf"),
    ],
)
def test_a_name_is_resolved(name, repository):
    assert resolve_name(name) == repository


def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3:0.6b").mkdir()
    (tmp_path / "mine").mkdir()
    assert resolve_name("qwen3:0.6b") == "qwen3:0.6b"
    assert resolve_name("mine") == "mine"
    (tmp_path / "qwen3").touch()  # a file is no model
    assert resolve_name("qwen3") == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("qwen3:99b", "the short names of qwen3 are qwen3:0.6b, qwen3:1.7b, "),
        ("qwen33", "did you mean qwen3 or "),
        ("smollm2:135", "the short names of smollm2 are smollm2:135m, smollm2:360m, smollm2:1.7b"),
        ("xyz", "quire list --short-names lists these"),
        ("a\0b", "quire list --short-names lists these"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_near_ones(name, suggestion, capsys):
    assert main(["generate", "hi", "--model", name]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert suggestion in printed.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line",
    [
        "serve NAME",
        "chat NAME",
        "generate hi --model NAME",
        "run-batch -i a -o b --model NAME",
        "compile NAME",
        "bench throughput NAME",
        "bench latency --model NAME",
        "bench claims NAME",
        "show NAME",
        "pull NAME",
    ],
)
def test_every_command_with_a_model_takes_a_short_name(line):
    given = build_parser().parse_args(line.replace("NAME", "smollm2:135m").split())
    engine_options(given)
    assert given.model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def names_of(*line: str) -> tuple[str | None, list[str]]:
    given = build_parser().parse_args(["serve", *line])
    engine_options(given)
    return given.model, ServerConfig.create(**server_options(given)).served_model_name


def test_a_server_has_the_short_name_as_a_second_name(tmp_path: Path):
    model = "Qwen/Qwen3-0.6B"
    assert names_of("qwen3:0.6b") == (model, [model, "qwen3:0.6b"])
    assert names_of("qwen3:0.6b", "--served-model-name", "small") == (model, ["small"])
    assert names_of(model) == (model, [])
    assert names_of("quire-demo") == (None, [])
    file = tmp_path / "quire.yaml"
    file.write_text("model: qwen3:0.6b")
    assert names_of("--config", str(file)) == (model, [model, "qwen3:0.6b"])
    assert names_of("--config", str(file), "a/b") == ("a/b", [])


def test_the_table_is_sound():
    assert all(sizes["default"] in sizes for sizes in _families().values())
    repositories = list(listed_names().values())
    assert len(set(repositories)) == len(repositories) >= 40
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", repository) for repository in repositories)
    assert all(name == name.lower() and "/" not in name for name in short_names())
    assert all(short_names()[short_name_of(repository)] == repository for repository in repositories)
    assert short_name_of("no/such") is None


def test_short_names_are_listed(capsys):
    assert main(["list", "--short-names"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert dict(line.split() for line in lines) == listed_names()
    assert main(["ls", "--short-names", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == listed_names()


def test_the_page_lists_them(request: pytest.FixtureRequest):
    rows = ["| family | sizes |", "|---|---|"]
    for family, sizes in _families().items():
        marked = [f"**{size}**" if size == sizes["default"] else size for size in sizes if size != "default"]
        rows.append(f"| `{family}` | {', '.join(marked)} |")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    expected = "\n".join(rows) + "\n"
    if request.config.getoption("--write"):
        PAGE.write_text(before + BEGIN + expected + END + after, encoding="utf-8")
    else:
        assert written == expected
