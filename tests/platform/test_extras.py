"""The commands that install what an optional feature needs."""

import json
import re
import subprocess
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest

from quire.platform import extras
from quire.platform.extras import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[2]


class Installed:
    """A distribution, and what pip recorded of its origin."""

    def __init__(self, **origin):
        self._text = json.dumps(origin) if origin else None

    def read_text(self, name):
        assert name == "direct_url.json"
        return self._text


def command_if(installed, monkeypatch):
    def distributions(name):
        assert name == DISTRIBUTION
        return installed

    monkeypatch.setattr("importlib.metadata.distributions", distributions)
    return install_command("audio")


def test_a_release_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages/quire/platform/extras.py"))
    assert command_if([Installed()], monkeypatch) == 'pip install "quire-llm[audio]"'


def test_a_wheel_is_named_with_its_file(monkeypatch, tmp_path):
    wheel = tmp_path / "quire_llm-1.0-py3-none-any.whl"
    wheel.touch()
    command = command_if([Installed(url=wheel.as_uri(), archive_info={})], monkeypatch)
    assert command == f'pip install "quire-llm[audio] @ {wheel.as_uri()}"'


@pytest.mark.parametrize("editable", [False, True])
def test_a_checkout_is_named_with_its_folder(editable, monkeypatch, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    option = "-e " if editable else ""
    build = Installed()  # an egg-info that pip left in the folder
    installed = Installed(url=folder.as_uri(), dir_info={"editable": editable})
    assert command_if([build, installed], monkeypatch) == f'pip install {option}"{folder}[audio]"'
    monkeypatch.chdir(folder)
    assert command_if([build, installed], monkeypatch) == f'pip install {option}".[audio]"'


def test_a_checkout_that_is_not_installed_is_named_with_its_folder(monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setattr(extras, "__file__", str(ROOT / "quire/platform/extras.py"))  # tests may run an installed copy
    assert command_if([], monkeypatch) == f'pip install -e "{ROOT}[audio]"'


@pytest.mark.slow
def test_pip_accepts_the_command_of_this_environment():
    command = install_command("audio") + " --dry-run --no-deps"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


def test_documents_name_extras_that_exist():
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    assert known == set(metadata(DISTRIBUTION).get_all("Provides-Extra"))
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*")]
    for file in files:
        if file.is_file():
            text = file.read_text(errors="replace")
            named = re.findall(r'install "(?:\.|quire-llm)\[([\w,]+)\]"', text)
            assert {extra for extras in named for extra in extras.split(",")} <= known, file
            assert "quire[" not in text, file
