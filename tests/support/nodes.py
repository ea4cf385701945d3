"""Two machines that share nothing but a virtual link: namespaces for network, processes and clocks, and own folders."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

import quire.demo
from support.server_process import Server
from support.waiting import LONGEST, eventually
from support.watched_commands import python_path

ADDRESSES = ("10.99.0.1", "10.99.0.2")  # of the two machines on their link; no one else sees these


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@functools.cache
def can_make_machines() -> bool:
    """Whether this process may make the namespaces. Root may, except in most containers."""
    programs = map(shutil.which, ("ip", "unshare", "nsenter"))
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not all(programs):
        return False
    with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
        name = f"quire-try-{os.getpid()}"
        run("ip", "netns", "add", name)
        try:
            run("ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "--time", "true")
            return True
        finally:
            run("ip", "netns", "del", name, check=False)
    return False


class Machine:
    """One machine. prefix: of a command that is to run on it. folder: with its home, and a copy of the bundled model.
    model: the copy. environment: of its processes."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.number, self.folder = f"quire-{os.getpid()}-{number}", number, folder
        self.model = folder / f"models-of-{number}" / "demo"
        shutil.copytree(Path(quire.demo.__file__).parent / "model", self.model)
        for name in ("home", "tmp", "work"):
            (folder / name).mkdir()
        self.secret = folder / "secret"
        self.secret.write_text("a secret that all machines of these tests have\n")
        self.secret.chmod(0o600)
        # The folder of compiled kernels is the only one that the machines share, so that they need not be compiled.
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        modules = python_path(Path(__file__).parents[1], Path(quire.__file__).parents[1])
        self.environment = {
            "PYTHONPATH": modules,
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "XDG_CACHE_HOME": cache,
        }
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        clock = str(100_000 * (1 + number))  # seconds; the machines have been up for different times
        self._unshare = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                self.name,
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--time",
                "--monotonic",
                clock,
                "--boottime",
                clock,
                "sleep",
                "infinity",
            ],
            stderr=subprocess.DEVNULL,
        )
        self._init = self._first_process()
        self.prefix = [
            "nsenter",
            "--target",
            str(self._init.pid),
            "--net",
            "--pid",
            "--mount",
            "--time",
            f"--wd={folder / 'work'}",
            "--",
        ]

    def add_model(self, name: str, path: Path) -> None:
        shutil.copytree(path, self.model.with_name(name), dirs_exist_ok=True)

    def _first_process(self) -> psutil.Process:
        def sleeping() -> list[psutil.Process]:
            return [p for p in psutil.Process(self._unshare.pid).children() if p.name() == "sleep"]

        return eventually(sleeping, "a namespace")[0]

    def processes(self, text: str = "") -> list[psutil.Process]:
        """All that run on it, with the text in their command lines."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                here = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == self._namespace
                alive = here and process != self._init and process.status() != psutil.STATUS_ZOMBIE
                if alive and text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    @property
    def _namespace(self) -> int:
        return os.stat(f"/proc/{self._init.pid}/ns/pid").st_ino

    def rank(self, number: int) -> psutil.Process:
        (found,) = (p for p in self.processes("quire.executor.rank") if p.cmdline()[-1] == str(number))
        return found

    def wait_until_empty(self) -> None:
        eventually(lambda: not self.processes(), lambda: [" ".join(p.cmdline()) for p in self.processes()])

    def close(self) -> None:
        self._init.kill()  # and so everything on the machine
        self._unshare.wait()
        run("ip", "netns", "del", self.name, check=False)


class Machines:
    """Two machines. Machine 0 can also be reached from outside, at `host`. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / f"machine{number}" for number in (0, 1)]
        for path in self.folders:
            path.mkdir()
        self.both = [Machine(number, path) for number, path in enumerate(self.folders)]
        names = [machine.name for machine in self.both]
        self._relay = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("relay.py")), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        self._outside = f"quire{os.getpid()}"
        run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", "outside", "netns", names[0])
        net = f"10.98.{os.getpid() % 250}"
        self.host = f"{net}.2"
        run("ip", "addr", "add", f"{net}.1/30", "dev", self._outside)
        run("ip", "link", "set", self._outside, "up")
        run("ip", "-n", names[0], "addr", "add", f"{self.host}/30", "dev", "outside")
        run("ip", "-n", names[0], "link", "set", "outside", "up")
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            run("ip", "-n", name, "link", "set", "link0", "up")

    def __getitem__(self, number: int) -> Machine:
        return self.both[number]

    def _answer(self) -> None:
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline(), "the link could not be made"

    def _change(self, what: str, value: float) -> None:
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{what} {value}\n")
        self._relay.stdin.flush()
        self._answer()

    def lose_packets(self, percent: float) -> None:
        """Lose so many of the packets between the machines."""
        self._change("loss", percent)

    def delay_packets(self, seconds: float) -> None:
        """Let each packet between the machines take so long."""
        self._change("delay", seconds)

    def mend(self) -> None:
        self.lose_packets(0)
        self.delay_packets(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.both:
            machine.close()
        run("ip", "link", "del", self._outside, check=False)
        assert self._relay.stdin is not None
        self._relay.stdin.close()
        self._relay.wait(LONGEST)


class OnMachine(Server):
    """`quire serve` on a machine."""

    def __init__(
        self,
        machine: Machine,
        *arguments: str,
        start_timeout: float = LONGEST,
        own_files: bool = True,
        model: str = "demo",
        **options: str,
    ) -> None:
        """own_files: give it the machine's secret, and its model with the given name."""
        self.machine = machine
        files = [str(machine.model.with_name(model)), "--cluster-secret-file", str(machine.secret)] if own_files else []
        super().__init__(
            *files,
            *arguments,
            wrapper=machine.prefix,
            start_timeout=start_timeout,
            **{**machine.environment, **options},
        )

    @property
    def main(self) -> psutil.Process:
        """The process of the command. The one that the test has started is its parent, outside."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def resume(self) -> None:
        self.main.resume()
        self.process.send_signal(signal.SIGCONT)

    def stop(self, seconds: float = LONGEST) -> int:
        self.main.terminate()
        return self.process.wait(seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # it stops when the process on the machine is stopped
            try:
                self.stop(60)
            except (subprocess.TimeoutExpired, psutil.Error, ValueError):
                for process in self.machine.processes():
                    process.kill()
                self.process.wait(LONGEST)
        self._reader.join(60)
        if error is not None:
            print(f"---- the log of machine {self.machine.number}\n{self.log}", file=sys.stderr)


class Headless(OnMachine):
    """`quire serve --headless` on a machine. `url` is the address of the head, as soon as it has joined."""

    ready_line = r"Joined the head at (\S+)"

    def __init__(self, machine: Machine, *arguments: str, model: str = "demo") -> None:
        super().__init__(machine, "--headless", *arguments, start_timeout=0, model=model)

    def _await_start(self, seconds: float) -> None:
        """The head is started next."""


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Skips the test where they cannot be made."""
    if not can_make_machines():
        pytest.skip("namespaces for machines need root, /dev/net/tun, ip, unshare and nsenter")
    with Machines(folder) as machines:
        yield machines
