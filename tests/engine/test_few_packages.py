"""An LLM needs few packages: machines with GPUs often have no network, nor may one install anything there."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What quire depends on (see pyproject.toml) for its server and its second process.
WITHOUT = """
    zmq prometheus_client fastapi fastapi_swagger pydantic pydantic_core uvicorn httptools uvloop yaml starlette
    aiohttp matplotlib
""".split()

PROGRAM = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from quire import LLM, SamplingParams
from quire.ops import OPS

LLM
assert not {{"psutil", "platformdirs"}} & set(sys.modules), "for CPUs only"
llm = LLM(max_model_len=128, num_gpu_blocks_override=64, attention_backend="reference", enforce_eager=True,
          kernels=dict.fromkeys(OPS, "reference"))
assert llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
"""


@pytest.mark.slow
def test_an_llm_runs_without_what_only_a_server_or_a_cpu_needs():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
