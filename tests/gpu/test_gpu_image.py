"""Quire starts on the reference image for GPUs, which lacks several packages and has no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

IMAGE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "image"
SUITE = IMAGE.parents[1] / "gpu_suite.py"


def on_image(code: str, wheels: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program in a process that finds only the image's packages and these wheels."""
    environment = os.environ | {"PYTHONPATH": str(IMAGE), "IMAGE_WHEELS": wheels}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def requirements() -> list[str]:
    program = [sys.executable, str(IMAGE / "image_packages.py"), "missing"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def test_only_what_the_image_has_is_found():
    code = """
        import importlib.metadata, json
        from importlib.util import find_spec
        names = ("torch", "numpy", "rich", "msgspec", "zmq", "pydantic", "platformdirs", "llguidance", "soundfile")
        found = [name for name in names if find_spec(name)]
        try:
            found.append(importlib.metadata.version("platformdirs"))
        except importlib.metadata.PackageNotFoundError:
            pass
        import quire
        print(json.dumps(found))
    """
    done = on_image(textwrap.dedent(code), wheels="msgspec")
    assert json.loads(done.stdout) == ["torch", "numpy", "rich", "msgspec"], done.stderr


def test_the_wheels_are_the_dependencies_that_the_image_lacks():
    missing = requirements()
    assert {"msgspec>=0.19,<1", "pydantic>=2.10,<3", "llguidance>=1.9,<2"} <= {*missing}
    every = tomllib.loads((IMAGE.parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {*missing} < {requirement.partition(";")[0].strip() for requirement in every}
    assert not [name for name in missing if name.startswith(("torch", "numpy", "jinja2", "markdown-it-py"))]


def test_the_sections_of_the_gpu_suite_can_be_imported():
    modules = "gpu_suite gpu_checks gpu_figures benchmarks.gpu.kernels benchmarks.sums_of_ranks".split()
    folders = [str(SUITE.parent), str(SUITE.parents[1])]
    imports = "".join(f"import {name}\n" for name in modules)
    done = on_image(f"import sys\nsys.path += {folders}\n{imports}", wheels="msgspec")
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_the_server_and_the_command_line_can_be_imported_with_the_wheels():
    wheels = " ".join(requirement.partition(">")[0] for requirement in requirements())
    code = "import quire.server.app, quire.cli.main, quire.structured.guidance, quire.engine.core_process"
    done = on_image(code, f"{wheels} starlette")
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_an_engine_starts_with_msgspec_alone_and_says_what_a_grammar_needs(tmp_path):
    pytest.importorskip("triton")
    from support.stand_in import run_on_stand_in

    printed = run_on_stand_in(
        """
        import json
        from quire import LLM, SamplingParams
        llm = LLM(device="cuda", max_num_seqs=4, max_model_len=64, load_format="dummy", require_cuda_graphs=True)
        outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        try:
            llm.generate("one", SamplingParams(structured_outputs={"regex": "a+"}), use_tqdm=False)
        except ValueError as error:
            reason = str(error)
        print(json.dumps([[len(output.outputs[0].token_ids) for output in outputs], reason]))
        """,
        PYTHONPATH=str(IMAGE),
        IMAGE_WHEELS="msgspec",
        XDG_CACHE_HOME=str(tmp_path),
    )
    lengths, reason = json.loads(printed.splitlines()[-1])
    assert lengths == [5, 5]
    assert "needs the package 'llguidance': pip install llguidance" in reason
    assert (tmp_path / "quire" / "triton").is_dir()
