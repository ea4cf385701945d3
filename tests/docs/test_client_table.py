"""The table of clients in docs/apis.md lists what tests/clients asks, and the packages that are installed for it."""

from __future__ import annotations

import json

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from support.client_environment import CLIENTS, REQUIREMENTS
from support.client_table import client_rows


@pytest.fixture(scope="module")
def installed() -> dict[str, list[SpecifierSet]]:
    """The versions of each package that are installed in some environment; names for Node have the prefix "npm:"."""
    versions: dict[str, list[SpecifierSet]] = {}
    for file in REQUIREMENTS.values():
        for line in file.read_text().splitlines():
            if not line.startswith("#"):
                requirement = Requirement(line)
                versions.setdefault(requirement.name, []).append(requirement.specifier)
    for name, range in json.loads((CLIENTS / "package.json").read_text())["dependencies"].items():
        versions[f"npm:{name}"] = [SpecifierSet(range.replace(" ", ","))]
    return versions


def test_every_script_is_in_the_table():
    scripts = [row.script for row in client_rows()]
    assert len(set(scripts)) == len(scripts)
    assert set(scripts) == {path.name for path in CLIENTS.glob("ask_*")}


def test_every_package_is_in_the_table_with_a_version_that_is_installed(installed):
    tried = {
        ("npm:" if row.script.endswith(".mjs") else "") + name: version
        for row in client_rows()
        for name, version in row.packages.items()
    }
    assert tried.keys() == installed.keys()
    for name, version in tried.items():
        assert any(version in versions for versions in installed[name]), (name, version, installed[name])
