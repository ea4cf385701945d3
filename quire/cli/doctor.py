"""Checks everything on this machine that Quire depends on, and reports problems with their solutions. It changes and
downloads nothing, except that --measure saves its profile. The exit status is 1 if there is a problem.

With --model, it instead shows what an engine with these options would run, and why: attention backends, kernels, KV
groups, limits, the drafter. No weights are downloaded or loaded. Missing kernels are compiled, as at a normal start.
"""  # the description of the command in its help

import argparse
import contextlib
import io
import json
import platform
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from quire._version import __version__
from quire.cli.flags import add_engine_flags, engine_options
from quire.cli.model import add_model_flag
from quire.config.engine import EngineConfig
from quire.observability.logging import printable

if TYPE_CHECKING:
    from quire.cli.checks.finding import Check

HELP = "say what is wrong on this machine, or what an engine would run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's speed, and keep the profile by which later starts choose threads and steps",
    )
    add_model_flag(
        parser,
        "show what an engine with this model (checkpoint directory, .gguf file, Hugging Face id or "
        "short name; quire-demo is the bundled one) and the options below would run",
    )
    add_engine_flags(parser)
    parser.set_defaults(log_level="ERROR")  # the table says it all


def run(arguments: argparse.Namespace) -> int:
    named = arguments.model is not None  # the name of the bundled model becomes None
    options = engine_options(arguments)
    if named or arguments.model is not None:
        return _show_engine(arguments.model, options, arguments.json)
    if options:
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} is for an engine; give its --model, too")
    return _examine(arguments)


def _show_engine(model: str | None, options: dict[str, Any], as_json: bool) -> int:
    from quire.cli.checks.engine_text import lines
    from quire.engine.assemble import explain  # imports torch

    data = explain(EngineConfig.create(model=model, **options))
    print(json.dumps(data, indent=2) if as_json else "\n".join(map(printable, lines(data))))
    return 0


def _examine(arguments: argparse.Namespace) -> int:
    from quire.cli.checks.examination import examine
    from quire.cli.checks.finding import Level
    from quire.cli.checks.table import Table

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have characters that the terminal lacks
    checks = _checks(arguments.measure)
    counts = Counter[Level]()
    findings = []
    table = Table.of(sys.stdout, checks)
    if not arguments.json:
        machine = f"Quire {__version__} on {platform.system()} {platform.release()}, {platform.machine()}"
        print(*table.wrapped(machine), sep="\n", flush=True)
    with contextlib.closing(examine(checks)) as examination:  # Ctrl-C ends a check that runs
        for name, finding in examination:
            counts[finding.level] += 1
            if arguments.json:
                findings.append({"check": name, **finding._asdict()})
            else:
                print(*table.lines(name, finding), sep="\n", flush=True)
    if arguments.json:
        totals = {"ok": counts[Level.OK], "notes": counts[Level.NOTE], "problems": counts[Level.PROBLEM]}
        print(json.dumps({"quire": __version__, **totals, "findings": findings}, indent=2))
    else:
        print(f"{_count(counts[Level.PROBLEM], 'problem')}, {_count(counts[Level.NOTE], 'note')}")
    return int(counts[Level.PROBLEM] > 0)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _checks(measures: bool) -> "dict[str, Check]":
    """Return all checks by name, in the order of the table. measures: whether to measure the machine."""
    from quire.cli.checks import folders, gpu, memory, network, processor, software, speed, system, threads

    return {
        "Python": software.check_python,
        "PyTorch": software.check_torch,
        "packages": software.check_packages,
        "extras": software.check_extras,
        "processor": processor.check_processor,
        "C++ compiler": processor.check_compiler,
        "CPU kernels": processor.check_kernels,
        "cores": threads.check_cores,
        "threads": threads.check_threads,
        "memory": memory.check_memory,
        "huge pages": memory.check_huge_pages,
        "memory bandwidth": memory.check_bandwidth,
        "machine profile": speed.profile_check(measures),
        "GPU": gpu.check_gpus,
        "Triton": gpu.check_triton,
        "open files": system.check_open_files,
        "processes": system.check_processes,
        "locked memory": system.check_locked_memory,
        "core dumps": system.check_core_dumps,
        "shared memory": system.check_shared_memory,
        "connections": system.check_connections,
        "clock": system.check_clock,
        "Quire's cache": folders.check_quire_cache,
        "Quire's state": folders.check_state,
        "hub's cache": folders.check_hub_cache,
        "temporary files": folders.check_temporary_files,
        "hub": network.check_hub,
        "proxies": network.check_proxies,
        "port": network.check_port,
    }
