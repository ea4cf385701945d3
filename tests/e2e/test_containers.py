"""Quire without a compiler, a home, a writable folder and privileges: slower, and otherwise as ever."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.ops.cpu.build import library
from support.container import can_unshare, container
from support.server import request
from support.server_process import Server
from support.waiting import LONGEST

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a cat."}]
FLOAT32 = ["--dtype", "float32", "--max-model-len", "256"]
WARNING = "There are no compiled CPU kernels"


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """Environment variables."""
    return {"CXX": "missing-compiler", "XDG_CACHE_HOME": str(tmp_path / "empty")}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With compiled kernels, where there is a compiler."""
    return LLM(dtype="float32", max_model_len=256, max_num_seqs=4)


def generated(llm: LLM) -> str:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    return PROMPT + output.outputs[0].text


def answered(llm: LLM) -> str:
    (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    return output.outputs[0].text


def quire(*arguments: str, wrapper: list[str] | None = None, text: str = "", **environment: str) -> Any:
    """Run a command; its result."""
    command = [*(wrapper or []), sys.executable, "-m", "quire", *arguments]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env={**os.environ, **environment}, timeout=LONGEST
    )


def events(url: str) -> Iterator[dict[str, Any]]:
    """Of a streamed chat."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 30, "stream": True}
    answer = request(url, "POST", "/v1/chat/completions", json.dumps(body).encode(), Content_Type="application/json")
    assert answer.status == 200, answer.body
    yield from answer.events


def streamed(url: str) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events(url) if e["choices"])


@pytest.mark.slow
def test_without_a_compiler_generate_says_the_same_after_one_warning(llm, no_compiler):
    result = quire("generate", "--temperature", "0", "--max-tokens", "30", *FLOAT32, PROMPT, **no_compiler)
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, generated(llm))
    assert result.stderr.count("WARNING") == result.stderr.count(WARNING) == 1
    assert "g++" in result.stderr


@pytest.mark.slow
def test_without_a_compiler_a_served_chat_streams_the_same_answer(llm, no_compiler):
    with Server(*FLOAT32, **no_compiler) as server:
        assert streamed(server.url) == answered(llm)
        assert server.log.count(WARNING) == 1


@pytest.mark.slow
def test_in_a_container_generate_says_the_same(llm):
    result = quire("generate", "--temperature", "0", "--max-tokens", "30", *FLOAT32, PROMPT, wrapper=container())
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, generated(llm)), result.stderr
    assert result.stderr.count("WARNING") == result.stderr.count(WARNING) == 1


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no compiler here")
def test_in_a_container_the_kernels_that_its_image_brings_are_used(llm):
    with tempfile.TemporaryDirectory() as image:
        Path(image).chmod(0o755)
        shutil.copytree(library().path.parent, Path(image, "quire/kernels"))
        arguments = ["--temperature", "0", "--max-tokens", "30", "--log-level", "INFO", *FLOAT32, PROMPT]
        result = quire("generate", *arguments, wrapper=container(XDG_CACHE_HOME=image))
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, generated(llm)), result.stderr
    assert "attention backend cpu" in result.stderr
    assert "WARNING" not in result.stderr


@pytest.mark.nightly
def test_in_a_container_quire_chat_answers_what_comes_from_a_pipe(llm):
    text = MESSAGES[0]["content"] + "\n"
    result = quire("chat", "--temperature", "0", "--max-tokens", "30", *FLOAT32, wrapper=container(), text=text)
    assert result.returncode == 0, result.stderr
    assert answered(llm) in result.stdout


@pytest.mark.nightly
def test_in_a_container_a_model_of_the_hub_is_an_error_that_names_it():
    result = quire("generate", "--model", "owner/name", PROMPT, wrapper=container())
    assert result.returncode == 1
    assert "'owner/name' is no directory here and could not be fetched" in result.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_in_a_container_a_served_chat_streams_the_same_answer(llm):
    with Server(*FLOAT32, wrapper=container()) as server:
        assert streamed(server.url) == answered(llm)
        assert server.stop() == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_in_a_container_two_ranks_find_each_other(llm):
    with Server(*FLOAT32, "--tensor-parallel-size", "2", wrapper=container()) as server:
        assert streamed(server.url) == answered(llm)
        assert server.log.count(WARNING) == 1
        assert server.log.count(" loaded in ") == 1


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="making a read-only root needs root, unshare and setpriv")
def test_the_container_of_these_tests_is_one():
    """A user without a name, home and capabilities to write, on a root that is read-only."""
    code = """
import os, pwd
for folder in ("/", "/tmp", "/var/tmp", os.getcwd()):
    assert not os.access(folder, os.W_OK), folder
open("/dev/shm/file", "w").close()
try:
    raise SystemExit(pwd.getpwuid(os.geteuid()))
except KeyError:
    assert os.path.expanduser("~") == "~"
"""
    result = subprocess.run([*container(), sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="making a read-only root needs root, unshare and setpriv")
def test_where_no_folder_can_be_written_generate_works_and_serve_says_what_it_needs(llm):
    wrapper = container(shared_memory=False)
    result = quire("generate", "--temperature", "0", "--max-tokens", "30", *FLOAT32, PROMPT, wrapper=wrapper)
    assert (result.returncode, result.stdout.rstrip("\n")) == (0, generated(llm)), result.stderr
    result = quire("serve", "--port", "0", wrapper=wrapper)
    assert result.returncode == 1
    assert "set TMPDIR" in result.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_without_a_compiler_part_of_the_parity_matrix_holds(no_compiler):
    """Other tests pin the reference kernels where the compiled ones exist, which is not the same."""
    choice = "reference and (llama or qwen3_moe or deepseek_v3) and (transformers and not block_sizes)"
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/models/test_parity.py", "-k", choice]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, **no_compiler}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
