"""The image of deploy/cpu.Dockerfile: built with Buildah on a minimal Debian, and run with a read-only root."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import psutil
import pytest

from support.commands import run
from support.container import can_unshare
from support.server import eventually, request
from support.waiting import LONGEST

DOCKERFILE = Path(__file__).parents[2] / "deploy/cpu.Dockerfile"
TOOLS = ("buildah", "mmdebstrap", "unshare", "setpriv")
LARGEST = 1_200_000_000  # bytes, unpacked
START_SECONDS = 300.0
PACKAGES = "python3,python3-venv,ca-certificates"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or not can_unshare(), reason=f"needs root and {', '.join(TOOLS)}"
    ),
]


class Image:
    """An image that Buildah has built, and its files. configuration: as Docker sees it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        store = ["--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs"]
        self._buildah = ["buildah", *store]
        base = self._base(folder)
        context = folder / "context"
        (context / "dist").mkdir(parents=True)
        shutil.copy(wheel, context / "dist")
        (context / "deploy").mkdir()
        shutil.copy(DOCKERFILE.with_name("entrypoint.sh"), context / "deploy")
        self(
            "build",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--format",
            "docker",
            "--build-arg",
            f"BASE={base}",
            *self._pip_options(folder),
            "--file",
            str(DOCKERFILE),
            "--tag",
            "localhost/quire",
            str(context),
        )
        container = self("from", "localhost/quire").strip()
        self.configuration = json.loads(self("inspect", container))["Docker"]["config"]
        self.files = Path(self("mount", container).strip())

    def __call__(self, *arguments: str) -> str:
        return run([*self._buildah, *arguments]).stdout

    def _base(self, folder: Path) -> str:
        """An image with Debian's Python and nothing else."""
        archive = folder / "root.tar"
        run(["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(archive)])
        container = self("from", "scratch").strip()
        self("add", container, str(archive), "/")
        self("commit", "--rm", container, "localhost/base")
        archive.unlink()
        return "localhost/base"

    def _pip_options(self, folder: Path) -> list[str]:
        """Mount pip's configuration on this machine, and the files that it names, for the time of the build."""
        listed = run([sys.executable, "-m", "pip", "config", "list"]).stdout
        pairs = [line.split("=", 1) for line in listed.splitlines()]
        values = {name.rpartition(".")[2]: value.strip("'") for name, value in pairs}
        if not values:
            return []
        file = folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
        mounts = {str(file): "/etc/pip.conf"}
        for word in " ".join(values.values()).split():
            path = "/" + word.removeprefix("file://").partition("/")[2]
            if word.startswith("file://"):  # the pages of an index may link to files beside it
                path = os.path.dirname(path)
            if os.path.exists(path) and path != "/":
                mounts[path] = path
        options = [word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}:ro")]
        return [*options, "--build-arg", f"PIP_EXTRA_INDEX_URL={values.get('extra-index-url', '')}"]

    def remove(self) -> None:
        self("umount", "--all")
        self("rm", "--all")

    def command(self) -> list[str]:
        """A prefix that runs a command as Docker does with --read-only and --tmpfs /tmp: as process 1, as the image's
        user, with its environment."""
        script = """set -e
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
mount -t tmpfs -o mode=755 tmpfs "$ROOT/dev"
for device in null zero urandom; do touch "$ROOT/dev/$device"; mount --bind /dev/$device "$ROOT/dev/$device"; done
mkdir -m 1777 "$ROOT/dev/shm"
exec env -i $ENVIRONMENT chroot --userspec="$USER" "$ROOT" "$@"
"""
        settings = {
            "ROOT": str(self.files),
            "USER": self.configuration["User"],
            "ENVIRONMENT": " ".join(self.configuration["Env"]),
        }
        variables = [f"{name}={value}" for name, value in settings.items()]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        return ["env", *variables, *namespaces, "sh", "-c", script, "sh"]


@pytest.fixture(scope="module")
def image(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    built = Image(folder, wheel)
    yield built
    built.remove()
    shutil.rmtree(folder, ignore_errors=True)


class Container:
    """The image's entry point, as process 1 of a container; a context manager."""

    def __init__(self, image: Image, log: Path, *arguments: str) -> None:
        configuration = image.configuration
        command = [*image.command(), *configuration["Entrypoint"], "--host", "127.0.0.1"]
        self._log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen([*command, "--port", "0", *arguments], stderr=stream)

    def first(self) -> psutil.Process | None:
        """Process 1, once it runs Quire, and not the shell that starts it."""
        children = psutil.Process(self.process.pid).children()
        return next((child for child in children if any("quire" in word for word in child.cmdline()[:2])), None)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        eventually(lambda: "Serving at" in self.log or self.process.poll() is not None)
        found = re.search(r"Serving at (\S+): ", self.log)
        assert found, self.log
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # unshare, which takes process 1 with it
        self.process.wait()


def size_of(folder: Path) -> int:
    """Bytes on disk of all files, each counted once."""
    found = (path.lstat() for path in folder.rglob("*"))
    return sum({facts.st_ino: facts.st_blocks * 512 for facts in found}.values())


def test_the_image_is_small_and_contains_nothing_of_the_machine_that_built_it(image):
    assert size_of(image.files) < LARGEST
    assert not any((image.files / path).exists() for path in ("wheels", "usr/bin/gcc"))
    configuration = image.files / "etc/pip.conf"  # Buildah leaves the empty place of a mount
    assert not configuration.exists() or configuration.read_text() == ""
    assert not [variable for variable in image.configuration["Env"] if "PIP" in variable]
    assert image.configuration["User"] == "10001:10001"


def test_a_server_in_the_image_answers_and_drains(image, tmp_path):
    with Container(image, tmp_path / "log") as container:
        url = container.url
        assert "attention backend cpu" in container.log
        assert "Compiling" not in container.log
        assert "There are no compiled CPU kernels" not in container.log
        kind, *check = image.configuration["Healthcheck"]["Test"]
        assert kind == "CMD"
        run([*image.command(), *(word.replace("http://127.0.0.1:8000", url) for word in check)])
        first = container.first()
        assert first is not None
        assert set(first.uids()) == {10001}
        body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(
                request, url, "POST", "/v1/completions", json.dumps(body).encode(), Content_Type="application/json"
            )
            eventually(lambda: json.loads(request(url, "GET", "/load").body)["server_load"] == 1)
            first.terminate()
            answer = pending.result()
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 300
        assert container.process.wait(LONGEST) == 0


def test_a_server_that_loads_its_model_as_process_1_ends_when_it_is_told_to(image, tmp_path):
    with Container(image, tmp_path / "log") as container:
        eventually(lambda: (first := container.first()) is not None and bool(first.children()))
        first = container.first()
        assert first is not None
        first.terminate()
        assert container.process.wait(LONGEST) == 128 + signal.SIGTERM
        assert "Serving at" not in container.log
