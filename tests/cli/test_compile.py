"""`quire compile`: kernels that are compiled ahead, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.stand_in import run_on_stand_in

_SMALL = ["--max-num-seqs", "4", "--max-model-len", "64", "--max-num-batched-tokens", "64"]


def _quire(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )


def test_an_unknown_target_is_refused_with_a_list_of_the_known_ones():
    done = _quire("compile", "--target", "sm_42")
    assert done.returncode == 2
    assert "unknown target 'sm_42'; known are: sm_80" in done.stderr
    assert "processors must be an integer" in _quire("compile", "--target", "sm_90:x").stderr


def test_without_a_target_the_command_says_what_to_give():
    done = _quire("compile")
    assert done.returncode == 1
    assert "give --target for a GPU, such as --target sm_90" in done.stderr


def test_options_of_serve_are_accepted_and_checked():
    assert "--max-num-seqs must be an integer of at least 1" in _quire("compile", "--max-num-seqs", "0").stderr
    assert "nothing to compile" in _quire("compile", "--port", "80", "--api-key", "x", "--max-num-seqs", "2").stderr


@pytest.mark.slow
def test_an_unknown_processor_is_refused_with_a_list_of_the_known_ones():
    done = _quire("compile", "--cpu", "i486")
    assert done.returncode == 2
    assert "unknown processor 'i486'; known are: native, amx, avx512-bf16" in done.stderr


@pytest.mark.nightly
def test_a_machine_without_a_compiler_and_a_model_that_does_not_exist_are_one_line_each(tmp_path: Path):
    pytest.importorskip("triton")
    done = _quire("compile", "--target", "sm_90", PATH="/nowhere", CC="", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("needs a C compiler: install gcc or clang")
    done = _quire("compile", "./nowhere", "--target", "sm_90", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("quire: error: model './nowhere': no such file")


@pytest.mark.nightly
def test_a_start_with_a_filled_cache_compiles_nothing_even_if_the_cache_was_moved_and_is_read_only(tmp_path: Path):
    pytest.importorskip("triton")
    done = _quire("compile", "--target", "sm_90", "--target", "sm_80:108", "--output", str(tmp_path / "quire"), *_SMALL)
    assert done.returncode == 0, done.stderr
    assert "sm_90: " in done.stderr
    (tmp_path / "image").mkdir()
    shutil.move(tmp_path / "quire", tmp_path / "image" / "quire")
    for card in ("sm_90", "sm_80"):
        printed = run_on_stand_in(
            """
            import json
            from quire import LLM, SamplingParams
            llm = LLM(device="cuda", max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64)
            llm.generate(["one", "two words"], SamplingParams(max_tokens=5, top_k=5), use_tqdm=False)
            print(json.dumps([len(device.compilations), device.cache_misses]))
        """,
            card,
            XDG_CACHE_HOME=str(tmp_path / "image"),
        )
        read, compiled = json.loads(printed.splitlines()[-1])
        assert read > 5
        assert not compiled
