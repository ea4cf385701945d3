"""The packages of the reference image for GPUs. wheels.sh calls this file as a program:

image_packages.py missing         prints the requirements of Quire that the image lacks
image_packages.py needless FOLDER prints the wheels in a folder that the image does not need
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

# The image has Python 3.12, torch 2.11 for CUDA 13.0, Triton 3.6 and transformers 5.17.
PACKAGES = """
    absl-py accelerate aiohttp anyio attrs certifi click cloudpickle cmake cuda-bindings cupy-cuda13x cython einops
    fsspec grpcio h11 hf-xet httpx huggingface-hub hypothesis jax jinja2 joblib lightning lxml markdown markdown-it-py
    matplotlib meson ml-dtypes mpi4py mpmath msgpack nanobind networkx ninja numba numpy nvidia-ml-py onnx onnxruntime
    packaging pandas peft pillow pip prometheus-client protobuf psutil pyarrow pybind11 pytest pytest-timeout
    pytest-xdist pyyaml regex requests rich safetensors scikit-learn scipy sentence-transformers sentencepiece
    setuptools sympy tiktoken timm tokenizers torch torchaudio torchvision tqdm transformers triton typer uvloop xxhash
"""
ABSENT = "fastapi llguidance msgspec outlines-core platformdirs pydantic pyzmq starlette uvicorn xgrammar"


def normalized(requirement: str) -> str:
    """The name of a package in a requirement or in a wheel's file name, in lower case and with "-"."""
    name = re.split(r"[^\w.-]", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(packages: str) -> set[str]:
    return {normalized(name) for name in packages.split()}


def _missing() -> Iterator[str]:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if normalized(requirement) not in names_of(PACKAGES):
            yield requirement.partition(";")[0].strip()


def _needless(folder: Path) -> Iterator[str]:
    for wheel in folder.glob("*.whl"):
        if normalized(wheel.name.partition("-")[0]) in names_of(PACKAGES):
            yield str(wheel)


if __name__ == "__main__":
    print(*(_missing() if sys.argv[1] == "missing" else _needless(Path(sys.argv[2]))), sep="\n")
