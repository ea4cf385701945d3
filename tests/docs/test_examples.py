"""The examples of README and docs are right: commands are parsed by Quire's own parser, and Python compiles.

tests/docs/test_documents_run.py runs them.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml

from quire.cli.flags import engine_options, server_options
from quire.cli.main import COMMANDS as COMMAND_NAMES
from quire.cli.main import build_parser
from quire.config.engine import EngineConfig, ServerConfig
from support.documents import GUIDES, ROOT, Block, Command, blocks, commands, write_files

LANGUAGES = {"bash", "python", "json", "yaml", "toml", "ini", "promql", "text", "dockerfile", "diff"}
PROGRAMS = {"quire", "pip", "python", "pytest", "curl", "ray", "openssl", "(", "mkdocs", "pre-commit"}
PROGRAMS |= {"docker", "python3", "install", "systemctl"}  # of deployment
PROGRAMS |= {"export", "benchmarks/gpu/wheels.sh", "benchmarks/gpu/first_contact.sh"}
PROGRAMS |= {"codex", "claude", "opencode", "qwen", "aider"}  # coding agents
BLOCKS = list(chain.from_iterable(map(blocks, GUIDES)))
COMMANDS = list(chain.from_iterable(map(commands, GUIDES)))


def test_a_block_says_what_it_contains():
    """Commands are `bash`, so that none escapes these tests; what a program prints is `text`."""
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_accepted(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [word for word in command.words if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[0] == "nsys":  # it starts what follows
        words = words[words.index("quire") :]
    elif words[:2] == ["docker", "run"]:  # the image is named quire, and starts a server if no command follows
        words = words[words.index("quire") :]
        words = words if words[1] in chain.from_iterable(COMMAND_NAMES) else ["quire", "serve", *words[1:]]
    program, *arguments = Path(words[0]).name if words[0].startswith("/") else words[0], *words[1:]
    assert program in PROGRAMS or Path(program).is_relative_to(".ci"), f"{program} is no program of these documents"
    if program == "pip":
        check_extras(command.text)
    elif program == "python":
        check_module(arguments)
    elif program == "quire":
        check_options(arguments, capsys)


def check_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["path/to/checkpoint" if argument == "MODEL" else argument for argument in arguments]
    try:
        given = build_parser().parse_args(arguments)
    except SystemExit as stop:
        if stop.code:
            pytest.fail(capsys.readouterr().err, pytrace=False)
        return
    if arguments[0] == "serve":
        EngineConfig.create(**engine_options(given))
        ServerConfig.create(**server_options(given))


def check_extras(command: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"[\w-]+", ",".join(re.findall(r"\[([\w,-]+)\]", command)))) <= set(extras)


def check_module(arguments: list[str]) -> None:
    """`python FILE` and `python -m MODULE`: the file is there."""
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file()
    elif arguments[1].startswith(("benchmarks", "quire")):
        path = ROOT / arguments[1].replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_python_compiles(block: Block):
    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("json", "yaml", "toml")], ids=str)
def test_data_can_be_read(block: Block):
    if block.language == "json":
        json.JSONDecoder().raw_decode(block.text)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    else:
        tomllib.loads(block.text)


def test_every_document_is_a_page_of_the_site():
    found = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("quire serve A && quire list  # two", ["quire serve A", "quire list"]),
        ("quire serve \\\n  --port 1", ["quire serve --port 1"]),
        ("quire serve --x '{\n \"a\": 1}'\nquire list", ["quire serve --x '{\n \"a\": 1}'", "quire list"]),
        ("# nothing\n\nquire list", ["quire list"]),
    ],
)
def test_commands_are_found(text: str, found: list[str], tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{text}\n```\n")
    assert [command.text for command in commands(page)] == found
