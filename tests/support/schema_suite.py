"""The official JSON-Schema-Test-Suite, which the source distribution of jsonschema carries."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = "jsonschema==4.26.0"


class Case(NamedTuple):
    file: str
    description: str
    schema: dict[str, Any] | bool


def schema_suite(directory: Path) -> list[Case]:
    """Each schema of draft 2020-12 outside of the optional files. Skips if the package cannot be downloaded."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema", PACKAGE]
    download = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    archives = list(directory.glob("jsonschema-*.tar.gz"))
    if not archives:
        pytest.skip(f"{PACKAGE} cannot be downloaded with pip: {download.stderr.strip()[-200:]}")
    cases = []
    with tarfile.open(archives[0]) as archive:
        for member in sorted(archive.getnames()):
            if "/json/tests/draft2020-12/" in member and member.count("/") == 4 and member.endswith(".json"):
                data = json.load(archive.extractfile(member))
                cases += [Case(member.rsplit("/", 1)[1], case["description"], case["schema"]) for case in data]
    return cases
