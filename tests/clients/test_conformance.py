"""The conformance suite llm-comply, against a real server: what fails is what benchmarks/conformance.toml explains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.client_environment import client_python
from support.server_process import Server

ROOT = Path(__file__).parents[2]
OPTIONS = "--dtype float32 --kv-cache-memory-bytes 256M --served-model-name demo gpt-5-demo claude-opus-4-demo".split()

pytestmark = pytest.mark.slow


def test_llm_comply_fails_only_where_the_table_says_why():
    python = client_python("llm-comply==0.5.0")
    greedy = ["--override-generation-config", '{"temperature": 0}']
    with Server("quire-demo/vision", *OPTIONS, *greedy) as server:
        command = [sys.executable, str(ROOT / "benchmarks" / "conformance.py"), "llm-comply"]
        process = subprocess.run(
            [*command, "--python", str(python), "--url", server.url], capture_output=True, text=True, check=False
        )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("| 0 |\n") == 3
