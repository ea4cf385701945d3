"""Real cgroups: the engine takes what they leave, and the bundled model needs little."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from support.cgroups import MEMORY, QUOTA, cgroup
from support.waiting import LONGEST

pytestmark = pytest.mark.slow
MB = 1 << 20


def generate(wrapper: list[str], **environment: str) -> Any:
    command = [*wrapper, sys.executable, "-m", "quire", "generate", "--log-level", "INFO", "--max-tokens", "40", "Once"]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=LONGEST)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > len("Once\n")
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_the_bundled_model_generates_within_512_mb(tmp_path, kernels):
    environment = {} if kernels == "compiled" else {"CXX": "missing-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    with cgroup("memory", MEMORY, 512 * MB) as group:
        result = generate(group.wrapper, **environment)
        print(f"peak memory with {kernels} kernels: {group.peak_memory / MB:.0f} MB")
        assert group.peak_memory <= 512 * MB
    kv_cache = float(re.search(r"KV cache: ([\d.]+) GiB", result.stderr)[1])
    assert 0 < kv_cache < 0.25  # half of what was free


def test_a_quota_of_one_processor_means_one_thread():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is only one processor")
    with cgroup("cpu", QUOTA, 100_000) as group:
        assert "Threads: 1 instead of " in generate(group.wrapper).stderr
    assert "instead of" not in generate([]).stderr
