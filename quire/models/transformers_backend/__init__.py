"""Runs transformers' own modelling code on Quire's paged attention, for architectures that Quire lacks.

It is imported only if `--model-impl transformers` is set, or for the encoder of a model.

The model receives the tokens of a step as one sequence, with their positions within their requests. Tokens of different
requests could interact only in attention, which is Quire's; probe.py verifies this.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")  # those that torchvision expects to exist when it is imported


def _declare_operators() -> None:
    """Let torchvision be imported without its compiled operators, which do not load beside another build of torch.
    Processors of pictures need none of them."""
    package = find_spec("torchvision")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    for library in (file for folder in folders for file in Path(folder).glob("_C*.so")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            for name in _OPERATORS:
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")


_declare_operators()
