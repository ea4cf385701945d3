"""The files of deploy/, by the tools that know their formats."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.flags import engine_options
from quire.cli.main import COMMANDS, build_parser
from quire.cli.serve import server_config
from quire.config.engine import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
UNIT = (DEPLOY / "systemd/quire.service").read_text()
GRACE = ServerConfig().drain_timeout + 5  # docs/production.md asks for it


def passes(tool: str, *arguments: str | Path) -> None:
    """Whether a tool, installed beside this interpreter or by the system, finds nothing. Skips if it is missing."""
    found = shutil.which(str(Path(sys.executable).with_name(tool))) or shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    result = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def pod() -> dict[str, Any]:
    (found,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "StatefulSet"]
    return found["spec"]["template"]["spec"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_hadolint_finds_nothing_in_the_dockerfiles(name):
    passes("hadolint", DEPLOY / f"{name}.Dockerfile")


@pytest.mark.slow
def test_yamllint_finds_nothing():
    passes("yamllint", "--strict", "--config-file", ROOT / ".yamllint.yaml", DEPLOY)


@pytest.mark.slow
def test_the_compose_file_follows_the_compose_specification():
    passes("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


@pytest.mark.slow
def test_the_manifests_follow_the_schemas_of_kubernetes():
    passes("kubernetes-validate", "--strict", DEPLOY / "kubernetes/quire.yaml")


@pytest.mark.slow
def test_systemd_finds_nothing_in_the_unit(tmp_path):
    unit = tmp_path / "quire.service"
    unit.write_text(UNIT.replace("/opt/quire/bin/quire", "/usr/bin/env"))  # the program must exist
    passes("systemd-analyze", "verify", unit)
    passes("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)


@pytest.mark.slow
def test_prometheus_takes_its_configuration():
    passes("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml")


def test_prometheus_scrapes_the_server_of_the_compose_file():
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert job["job_name"] == host == "quire"
    assert COMPOSE["services"][host]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_running_requests_have_the_time_to_finish_everywhere():
    wait = float(COMPOSE["services"]["quire"]["stop_grace_period"].removesuffix("s"))
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)
    assert (wait, float(stop)) == (GRACE, GRACE)
    (container,) = pod()["containers"]
    *_, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod()["terminationGracePeriodSeconds"] == GRACE + float(seconds)


@pytest.fixture
def entry(tmp_path):
    """The command line of quire for the arguments of a container."""
    (tmp_path / "quire").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    (tmp_path / "quire").chmod(0o755)

    def run(*words: str) -> list[str]:
        command = ["/bin/sh", DEPLOY / "entrypoint.sh", *words]
        return subprocess.check_output(command, text=True, env={"PATH": str(tmp_path)}).splitlines()

    return run


def test_a_container_takes_a_model_or_a_command(entry):
    serve = ["serve", "--host", "0.0.0.0"]
    assert entry() == serve
    assert entry("some/model", "--dtype", "float32") == [*serve, "some/model", "--dtype", "float32"]
    assert entry("--port", "1") == [*serve, "--port", "1"]
    assert entry("serve", "a model") == [*serve, "a model"]
    for name in (name for names in COMMANDS for name in names if name != "serve"):
        assert entry(name, "x") == [name, "x"]
    assert entry("--help") == ["--help"]


def test_every_command_line_is_one_that_quire_takes(entry):
    (container,) = pod()["containers"]
    compose = [re.sub(r"\$\{\w+:-(\S*)\}", r"\1", word) for word in COMPOSE["services"]["quire"]["command"]]
    (unit,) = re.findall(r"^ExecStart=/opt/quire/bin/quire (.*)$", UNIT, re.M)
    unit = unit.replace("/etc/quire/quire.yaml", str(DEPLOY / "systemd/quire.yaml"))
    for words in (entry(*compose), entry(*container["args"]), unit.split()):
        arguments = build_parser().parse_args(words)
        engine_options(arguments)
        assert arguments.model == "Qwen/Qwen3-0.6B"
        assert server_config(arguments).port == 8000


def test_image_and_manifests_name_the_same_user():
    for name in ("cpu", "cuda"):
        assert "USER 10001:10001" in (DEPLOY / f"{name}.Dockerfile").read_text()
    assert {pod()["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}


def test_the_wheel_that_conda_installs_is_that_of_this_version():
    from quire import __version__

    pip = yaml.safe_load((DEPLOY / "environment.yml").read_text())["dependencies"][-1]["pip"]
    assert pip[-1] == f"../dist/quire_llm-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
