"""Ranks of another machine, whose agent is a process of this one here. tests/e2e/test_nodes.py has two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.engine.core import EngineDeadError
from quire.engine.llm import LLM
from quire.executor.local_ranks import LocalRanks
from quire.executor.remote_ranks import RemoteRanks
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.waiting import LONGEST

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 176, "max_num_seqs": 32, "kv_cache_memory_bytes": "64M"}
PORT = 20_000 + os.getpid() % 10_000


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"a secret that is long enough for this")
    path.chmod(0o600)
    return path


@pytest.fixture
def agent(checkpoints, secret) -> Iterator[subprocess.Popen[str]]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        str(checkpoints.path("llama")),
        "--headless",
        "-tp",
        "2",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-port",
        str(PORT),
        "--cluster-secret-file",
        str(secret),
        *flags,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.slow
def test_ranks_of_two_machines_say_what_one_says_until_one_is_lost(checkpoints, agent, secret):
    path = checkpoints.path("llama")
    prompts = [[5, 6, 7, index] for index in range(6)]
    expected = tokens_of(generate(make_llm(path), prompts))
    llm = LLM(path, tensor_parallel_size=2, nnodes=2, master_port=PORT, cluster_secret_file=str(secret), **OPTIONS)
    assert [type(group) for group in llm.core.executor._ranks.groups] == [LocalRanks, RemoteRanks]
    assert tokens_of(generate(llm, prompts)) == expected
    (rank,) = (p for p in psutil.Process(agent.pid).children() if "quire.executor.rank" in p.cmdline())
    assert rank.cmdline()[-1] == "1"
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    agent.kill()
    with pytest.raises(EngineDeadError, match="rank"):
        for _ in stream:
            pass
    llm.shutdown()
    psutil.wait_procs([rank], timeout=LONGEST)
    assert not rank.is_running()


@pytest.mark.slow
def test_an_agent_whose_options_differ_is_refused_and_ends_with_the_reason(checkpoints, agent, secret):
    other = {"max_num_seqs": 16, "tensor_parallel_size": 2, "nnodes": 2, "master_port": PORT}
    options = {**OPTIONS, **other, "cluster_secret_file": str(secret)}
    program = "import sys; from quire import LLM; LLM(sys.argv[1], **eval(sys.argv[2]))"
    executor = [sys.executable, "-c", program, str(checkpoints.path("llama")), repr(options)]
    with subprocess.Popen(executor, stderr=subprocess.PIPE, text=True) as head:
        _, said = agent.communicate(timeout=LONGEST)
        assert agent.returncode == 1
        difference = "differs: it is 16 at the head, and 32 at the node"
        assert f"--max-num-seqs {difference}" in said.strip().splitlines()[-1]
        head.kill()
        assert f"max_num_seqs {difference}" in head.communicate()[1]
