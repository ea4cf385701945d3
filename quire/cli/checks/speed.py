"""The check of this machine's profile, from which an engine on CPUs chooses its threads and step size."""

import os
from collections.abc import Iterator
from functools import partial

from quire.cli.checks.engine import need_engine
from quire.cli.checks.finding import Check, Finding, note, ok

_PARAMETERS, _LAYERS = 10**9, 24  # of a model as an example
_STREAMS = 256
_WHEN_IDLE = "Run quire doctor --measure while nothing else runs."
_NAMES = {"dense": "bfloat16", "int8": "8 bits", "int4": "4 bits"}


def profile_check(measures: bool) -> Check:
    """measures: measure the machine first."""
    return partial(_check, measures)


def _check(measures: bool) -> Iterator[Finding]:
    need_engine()
    from quire.engine.machine import IdleMeasurement, current_key, most_threads
    from quire.ops.cpu.build import library
    from quire.platform.machine_profile import age_text, can_keep_profile, read_profile
    from quire.worker.machine_defaults import Estimate, Work, tokens_of_a_step

    if wanted := os.environ.get("OMP_NUM_THREADS"):
        yield ok(f"not used, since OMP_NUM_THREADS={wanted} chooses the threads")
        return
    key = current_key("native")
    profile = read_profile(key)
    if measures:
        if not can_keep_profile():
            yield note("cannot be kept", "Set XDG_CACHE_HOME to a folder that this user can write.")
            return
        library()  # compiles the kernels, if need be
        measurement = IdleMeasurement(key, most_threads(), profile, (0.0,))
        measurement.finish()
        profile = measurement.result
    if profile is None and measures:
        yield note("the machine was too busy to be measured", _WHEN_IDLE)
    elif profile is None:
        yield ok(
            "not measured, so engines have a thread for each processor and steps of 512 tokens, until quire serve "
            "has been idle, or until quire doctor --measure"
        )
    elif not profile.is_quiet:
        found = f"the machine was busy when it was measured, on {age_text(profile)}, so the figures are not used"
        yield note(found, _WHEN_IDLE)
    else:
        estimates = {
            name: Estimate(profile, Work(kind, _PARAMETERS, _PARAMETERS // 10, _LAYERS))
            for kind, name in _NAMES.items()
        }
        chosen = [
            f"{name}: {estimate.fastest / 1e9:,.0f} GFLOP/s, {estimate.threads()} threads, steps of "
            f"{tokens_of_a_step(estimate.chunk(), _STREAMS)} tokens"
            for name, estimate in estimates.items()
            if estimate.is_usable
        ]
        yield ok(f"measured on {age_text(profile)}; a model of a billion parameters has, with {'; with '.join(chosen)}")
