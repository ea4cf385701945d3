"""Checks of the installed software: Python, PyTorch, the other packages, and extras."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import TYPE_CHECKING

from quire.cli.checks.engine import import_failure
from quire.cli.checks.finding import Finding, note, ok, problem
from quire.platform.extras import DISTRIBUTION, install_command

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_NOT_FOR_USERS = ("test", "dev")  # extras for work on Quire


def check_python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    needed = metadata(DISTRIBUTION)["Requires-Python"]
    if SpecifierSet(needed).contains(found, prereleases=True):
        yield ok(found)
    else:
        yield problem(f"{found}, but Quire needs {needed}", "Install Quire into an environment with such a Python.")


def check_torch() -> Iterator[Finding]:
    (needed,) = (requirement for requirement in _requirements() if requirement.name == "torch")
    if (unmet := _unmet(needed)) is not None:
        yield problem(unmet, f'pip install "{needed}"')
    failure = import_failure()
    if failure is not None:
        yield problem(
            f"cannot be imported: {failure}",
            "Install it again (pip install --force-reinstall torch). If memory or addresses are limited (ulimit -v), "
            "raise the limit.",
        )
    elif unmet is None:
        import torch

        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        if torch.version.hip:
            build = f"ROCm {torch.version.hip}"
        yield ok(f"{torch.__version__}, built for {build}")


def check_packages() -> Iterator[Finding]:
    needed = [requirement for requirement in _requirements() if requirement.name != "torch"]
    unmet = {str(requirement): text for requirement in needed if (text := _unmet(requirement)) is not None}
    if unmet:
        names = " ".join(f'"{requirement.partition(";")[0].strip()}"' for requirement in unmet)
        yield problem("; ".join(unmet.values()), f"pip install {names}")
    else:
        yield ok(f"{len(needed)} more packages that Quire needs, all in versions that it supports")


def check_extras() -> Iterator[Finding]:
    complete = []
    incomplete = []
    for extra in metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        if extra in _NOT_FOR_USERS:
            continue
        needed = _requirements(extra)
        missing = [requirement.name for requirement in needed if _installed(requirement.name) is None]
        if missing:
            incomplete.append(extra)
            continue
        complete.append(f"{extra} ({', '.join(f'{r.name} {_installed(r.name)}' for r in needed)})")
        unmet = [text for requirement in needed if (text := _unmet(requirement)) is not None]
        if unmet:
            yield note(f"{extra}: {'; '.join(unmet)}", install_command(extra))
    texts = ["installed: " + ", ".join(complete)] if complete else []
    texts += ["not installed: " + ", ".join(incomplete)] if incomplete else []
    yield ok("; ".join(texts))


def _requirements(extra: str = "") -> "list[Requirement]":
    """Quire's requirements on this machine or, for an extra, the additional requirements."""
    from packaging.requirements import Requirement

    chosen = []
    for line in requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        is_always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        is_chosen = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if is_chosen and (not extra or not is_always):
            chosen.append(requirement)
    return chosen


def _unmet(requirement: "Requirement") -> str | None:
    """Return the problem with a package's installed version, or None."""
    found = _installed(requirement.name)
    if found is None:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found} is installed, but Quire needs {requirement.specifier}"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
