"""Checkpoints and reference outputs for all tests, made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other

import pytest
import torch

from support.checkpoints import Checkpoints
from support.reference import References

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> References:
    return References(checkpoints)
