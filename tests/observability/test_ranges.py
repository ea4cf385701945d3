"""Ranges for Nsight Systems, as a library sees them that NVTX loads in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quire.config.engine import ConfigError
from quire.engine.llm import LLM

PROGRAM = """
from quire import LLM, SamplingParams
llm = LLM(enable_layerwise_nvtx_tracing={on}, enforce_eager={eager}, max_model_len=512, kv_cache_memory_bytes=1 << 24)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
print(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text)
"""


def run(folder: Path, on: bool, eager: bool) -> tuple[str, list[str]]:
    """The answer of a process, and what the library has written."""
    library, names = folder / "listener.so", folder / f"names-{on}-{eager}"
    if not library.exists():
        source = Path(__file__).with_name("nvtx_listener.cpp")
        subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library), "NVTX_NAMES": str(names)}
    program = PROGRAM.format(on=on, eager=eager)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    return ended.stdout, names.read_text().splitlines() if names.exists() else []


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_stations_and_layers_are_ranges_within_each_other(tmp_path):
    plain, nothing = run(tmp_path, on=False, eager=True)
    assert nothing == []
    answer, lines = run(tmp_path, on=True, eager=True)
    assert answer == plain
    layers = len(LLM(max_model_len=512).core.executor._worker.model.layers)
    begun = Counter(line[1:] for line in lines if line.startswith(">"))
    assert begun == {
        **dict.fromkeys(("schedule", "step", "prepare", "forward", "sample", "output"), 3),
        **{f"layer {number}": 3 for number in range(layers)},
    }
    depth, seen = list[str](), set[tuple[str, ...]]()
    for line in lines:
        if line == "<":
            depth.pop()
        else:
            depth.append(line[1:])
            seen.add(tuple(depth))
    assert not depth
    assert {("schedule",), ("step", "prepare"), ("step", "forward", "layer 0"), ("sample",), ("output",)} <= seen


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_recorded_steps_have_stations_without_layers(tmp_path):
    _, lines = run(tmp_path, on=True, eager=False)
    begun = Counter(line[1:] for line in lines if line.startswith(">"))
    assert begun["forward"] == begun["step"] == 3
    assert begun["layer 0"] < 3


def test_without_the_library_the_option_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ConfigError, match=r"needs nvtx: pip install .*\[profile\]"):
        LLM(enable_layerwise_nvtx_tracing=True)
