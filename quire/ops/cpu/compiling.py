"""Runs the compiler: a job compiles one translation unit into a shared library.

This file is also a program that background.py starts. It uses only the standard library, so it does not import torch.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_OUTPUT_LINES = 8  # shown of a failing compiler's output
# If memory runs out, Linux should kill the compiler, not the process that started it.
_VICTIM = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")


Job = tuple[list[str], Path]  # the compiler's command without the output option, and the library that it creates


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine. The message contains the reason, and a remedy or the compiler's
    output."""


def run(command: Sequence[str], temporary: str) -> None:
    """Run a command of the compiler. temporary: a folder for its files. Raises BuildError if it fails."""
    environment = {**os.environ, "TMPDIR": temporary, "LC_ALL": "C"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([*_VICTIM, *command], text=True, env=environment, check=False, **pipes)  # type: ignore[call-overload]
    if done.returncode != 0:
        output = "\n".join(done.stdout.splitlines()[:_OUTPUT_LINES]) or f"exit status {done.returncode}"
        raise BuildError(f"{command[0]} failed:\n{output}")


def seal(library: Path) -> None:
    """Add a digest to the end of the file, where the loader ignores it.

    It detects a file that was truncated on a full or crashed disk, which could kill the process that loads it.
    """
    code = library.read_bytes()
    library.write_bytes(code + hashlib.sha256(code).digest())
    library.chmod(0o755)


def is_sealed(library: Path) -> bool:
    """Return whether the file exists and its digest matches."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


@contextlib.contextmanager
def _scratch(library: Path, waits: bool = True) -> Iterator[Path | None]:
    """Yield a folder in which to create the library, or None if it exists, perhaps because another process has just
    made it.

    waits: whether to wait while another process makes it, instead of yielding None.
    """
    import fcntl  # not on Windows, where nothing is compiled

    with library.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        if is_sealed(library):
            yield None
            return
        folder = library.with_suffix(".tmp")
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed process: this one has the lock
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def compile_unit(command: Sequence[str], library: Path, waits: bool = True) -> None:
    """Compile a library unless it exists. command: the compiler's command, without the output option. waits: see
    `_scratch`. Raises BuildError, OSError."""
    with _scratch(library, waits) as folder:
        if folder is not None:
            made = folder / "made.so"
            run([*command, "-o", str(made)], str(folder))
            seal(made)
            os.replace(made, library)


def compile_units(jobs: Sequence[Job], at_once: int, waits: bool = True) -> None:
    """Compile the libraries, `at_once` in parallel. Raises BuildError and OSError like `compile_unit`."""
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        futures = [pool.submit(compile_unit, command, library, waits) for command, library in jobs]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def compile_library(compiler: Sequence[str], sources: Sequence[Sequence[str]], library: Path, at_once: int) -> None:
    """Compile sources, each with its own options, into one library unless it exists. compiler: its command, with the
    common options. Raises BuildError, OSError."""
    with _scratch(library) as folder:
        if folder is None:
            return
        objects = [f"{folder}/{number}.o" for number in range(len(sources))]
        with ThreadPoolExecutor(max(1, at_once)) as pool:
            commands = [[*compiler, "-c", *source, "-o", made] for source, made in zip(sources, objects, strict=True)]
            list(pool.map(run, commands, [str(folder)] * len(commands)))
        linked = folder / "linked.so"
        run([*compiler, "-shared", *objects, "-o", str(linked)], str(folder))
        seal(linked)
        os.replace(linked, library)


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
    """Show on the terminal that kernels are being compiled, and how long it took."""
    started = time.monotonic()
    print("Compiling CPU kernels (first use) ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        print("failed", file=sys.stderr, flush=True)
        raise
    print(f"{time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def main() -> int:
    """Compile the jobs that background.py writes to the standard input. First compile those that an engine waits for,
    and write a line, which is empty unless one failed. Then compile the others at the lowest priority."""
    order = json.load(sys.stdin)
    problem = ""
    with contextlib.suppress(OSError):
        os.nice(order["nice"])
    try:
        compile_units([(command, Path(path)) for command, path in order["first"]], order["at_once"])
    except (BuildError, OSError) as error:
        problem = str(error)
    with contextlib.suppress(OSError):  # the engine has ended
        sys.stdout.write(json.dumps(problem) + "\n")
        sys.stdout.close()
    if problem:
        return 1
    with contextlib.suppress(OSError):
        os.nice(19)
    then = [(command, Path(path)) for command, path in order["then"]]
    try:
        with _alone(then[0][1].parent) if then else contextlib.nullcontext(False) as is_alone:
            compile_units(then if is_alone else [], order["at_once"], waits=False)
    except (BuildError, OSError):
        return 1  # an engine that needs these kernels compiles them again and reports the error
    return 0


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Yield whether no other process, such as another rank's, is doing the same."""
    import fcntl

    with (folder / "all.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


if __name__ == "__main__":
    sys.exit(main())
