"""Coding agents complete a small task with a real model, by the configurations and commands of docs/agents.md.

QUIRE_CODER_MODEL names the model, such as a GGUF file of Qwen2.5-Coder; QUIRE_AGENTS the folder with the packages of
agents/package.json are installed, by default .ci/agents.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client_environment import CI, client_python
from support.documents import ROOT, Block, blocks
from support.server_process import Server

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs" / "agents.md"
ADDRESS = "http://127.0.0.1:8000"  # of the page's server
LONGEST = 1800  # seconds of an agent
ANSWERS = '{"temperature": 0, "repetition_penalty": 1.1, "max_new_tokens": 300}'
OFFLINE = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = os.environ.get("QUIRE_CODER_MODEL")
    if not model:
        pytest.skip("QUIRE_CODER_MODEL does not name a model")
    options = (
        "--served-model-name coder --max-model-len 32768 --tool-strict-level parameter --kv-cache-memory-bytes 1G "
        "--response-store memory"
    )
    threads = str(os.cpu_count() or 1)
    command = ["--model", model, *options.split(), "--override-generation-config", ANSWERS]
    with Server(*command, OMP_NUM_THREADS=threads) as server:
        yield server


def section(title: str) -> list[Block]:
    """The blocks of code below a heading of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"## {title}") + 1
    end = next((number for number, line in enumerate(lines) if number > start and line.startswith("## ")), len(lines))
    return [block for block in blocks(PAGE) if start < block.line <= end]


class Agent:
    """An agent in a home and a project of its own, configured by a section of the page."""

    def __init__(self, title: str, files: list[str], server: Server, folder: Path) -> None:
        """files: the paths below the home of the section's blocks, in their order."""
        self.home = folder / "home"
        self.project = folder / "project"
        self.project.mkdir(parents=True)
        *contents, last = section(title)
        command = last.text.replace("\\\n", " ").replace("~", str(self.home)).replace(ADDRESS, server.url)
        self._command = shlex.split(command)
        for name, block in zip(files, contents, strict=True):
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text.replace(ADDRESS, server.url))

    def run(self, program: Path | None = None, *arguments: str) -> str:
        """What the agent prints. arguments: put before those of the page's command, behind a subcommand."""
        name, *rest = self._command
        found = program or Path(os.environ.get("QUIRE_AGENTS", CI / "agents")) / "node_modules" / ".bin" / name
        if not found.exists():
            pytest.skip(f"{name} is not installed: .ci/nightly installs it")
        subcommand = rest[:1] if rest[0] in ("exec", "run") else []
        # No variable of the caller configures the agent.
        environment = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
        process = subprocess.run(
            [found, *subcommand, *arguments, *rest[len(subcommand) :]],
            cwd=self.project,
            env={**environment, **OFFLINE, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout + process.stderr

    def read(self, name: str) -> str:
        return (self.project / name).read_text()


def requests(server: Server, path: str) -> int:
    """The number of completed requests to a path."""
    return sum(f"POST {path} 200" in line for line in server.log.splitlines())


def test_codex(server, tmp_path):
    files = [".codex/config.toml", ".codex/brief.config.toml", ".codex/brief.md"]
    agent = Agent("Codex", files, server, tmp_path)
    agent.run(None, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    assert agent.read("hello.txt") == "hello\n"
    assert requests(server, "/v1/responses") >= 2  # the call, and the answer to its result


@pytest.mark.parametrize(
    ("name", "file", "path"),
    [
        ("Claude Code", ".claude/settings.json", "/v1/messages"),
        ("opencode", ".config/opencode/opencode.json", "/v1/chat/completions"),
        ("Qwen Code", ".qwen/settings.json", "/v1/chat/completions"),
    ],
)
def test_an_agent_with_one_file_of_settings(server, tmp_path, name, file, path):
    before = requests(server, path)
    agent = Agent(name, [file], server, tmp_path)
    agent.run()
    assert agent.read("hello.txt") == "hello\n"
    assert requests(server, path) >= before + 2


def test_aider(server, tmp_path):
    agent = Agent("aider", [".aider.conf.yml"], server, tmp_path)
    (agent.project / "hello.py").write_text('print("helo")\n')
    subprocess.run(["git", "init", "--quiet", agent.project], check=True)
    agent.run(client_python("aider-chat==0.86.2").with_name("aider"))
    assert agent.read("hello.py") == 'print("hello")\n'
