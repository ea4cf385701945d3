"""Plan capacity: which parallelism and how many devices a model needs for given traffic. It simulates the real
scheduler over the traffic. Step times are computed for the devices of --gpus, or fitted to steps that quire plan
measure measured on this machine and wrote to a file for --fit. Only the model's small files are read, no weights.
"""  # the description of the command in its help

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.flags import add_flags, add_log_level, engine_options
from quire.cli.model import add_model_flag
from quire.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from quire.platform.extras import install_command
from quire.platform.limits import processors

if TYPE_CHECKING:
    from quire.planner.fitted import Fit
    from quire.planner.memory import EngineOptions
    from quire.planner.plan import Result, Task
    from quire.planner.sizes import Footprint

HELP = "simulate a model under a traffic: what fits, which parallelism, latencies and cost"
_MODEL_FLAGS = ("quantization", "max_model_len", "revision", "download_dir", "hf_token")
_CACHE_FLAGS = ("block_size", "kv_cache_dtype", "gpu_memory_utilization")
_SCHEDULER_FLAGS = ("max_num_seqs", "max_num_batched_tokens")
_BYTES = {"int8": 1, "fp8": 1, "bfloat16": 2, "float16": 2}
_MEASURE_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "action",
        nargs="?",
        choices=("simulate", "measure"),
        default="simulate",
        help="simulate (the default), or measure steps on this machine for --fit",
    )
    add_model_flag(parser)
    plan = parser.add_argument_group("Plan")
    plan.add_argument("--gpus", metavar="DEVICExN", help="devices, such as H100x8 or L4; ? lists those that are known")
    plan.add_argument(
        "--traffic",
        metavar="TRAFFIC",
        help="file of requests (the traces of quire bench serve, and Mooncake's), perhaps followed by ,rate=10; or "
        "rate=10,input=1024,output=256, and perhaps requests, spread, burstiness, prefix, prefixes and seed",
    )
    plan.add_argument(
        "--slo",
        metavar="LIMITS",
        help="what must hold, such as ttft=500ms,p95:itl=50ms; metrics are ttft, itl, tpot and e2e, and percentiles 99 "
        "by default",
    )
    plan.add_argument("--price", type=float, metavar="DOLLARS", help="price of a device for an hour")
    plan.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="SIZES",
        help="only this layout, such as tp=4,dp=2 or tp=8,ep; may be repeated (default: all that are possible)",
    )
    plan.add_argument("--fit", type=Path, metavar="FILE", help="step times from this file, instead of --gpus")
    plan.add_argument("--no-search", action="store_true", help="do not search the load at which the limits are missed")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot; needs matplotlib")
    measure = parser.add_argument_group("Measure")
    measure.add_argument(
        "--output", "-o", type=Path, metavar="FILE", dest="measured", help="file for the measured steps"
    )
    measure.add_argument("--seconds", type=float, default=_MEASURE_SECONDS, help="how long to measure (default: 60)")
    add_flags(parser, ModelConfig, _MODEL_FLAGS)
    add_flags(parser, CacheConfig, _CACHE_FLAGS)
    add_flags(parser, SchedulerConfig, _SCHEDULER_FLAGS)
    add_log_level(parser, "WARNING")


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    return _measure(arguments, options) if arguments.action == "measure" else _simulate(arguments, options)


def _simulate(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    from quire.planner import report
    from quire.planner.layout import layouts, parse_layout
    from quire.planner.plan import plan

    if arguments.gpus == "?":
        print(_devices())
        return 0
    if arguments.plot is not None and find_spec("matplotlib") is None:
        raise RuntimeError(f"quire plan --plot needs matplotlib: {install_command('bench')}")
    task, ranks = _task(arguments, options)
    wanted = [parse_layout(text) for text in arguments.layout] or layouts(ranks, task.footprint.spec)
    for layout in wanted:
        if layout.ranks > ranks:
            raise ValueError(f"--layout needs {layout.ranks} devices ({layout}), but --gpus has {ranks}; see --gpus")
    results = list(_with_progress(plan(task, wanted, processors()), len(wanted)))
    if arguments.plot is not None:
        from quire.planner.plot import plot  # imports matplotlib, which not every installation has

        plot(arguments.plot, arguments.model or "the bundled model", task, results)
    print(json.dumps(report.as_json(task, results), indent=1) if arguments.json else report.text(task, results))
    return 0


def _task(arguments: argparse.Namespace, options: dict[str, Any]) -> "tuple[Task, int]":
    """Return everything that the simulation depends on, and the number of devices. Raises ValueError for flags that
    cannot be combined.
    """
    from quire.bench.slo import parse
    from quire.planner.devices import parse_devices
    from quire.planner.fitted import Fitted, read_fit
    from quire.planner.plan import Task
    from quire.planner.traffic import read_traffic

    if (arguments.gpus is None) == (arguments.fit is None):
        raise ValueError("give either --gpus, such as --gpus H100x8, or --fit with a file of quire plan measure")
    if arguments.traffic is None:
        raise ValueError("--traffic is missing: a file of requests, or rate=10,input=1024,output=256")
    if arguments.price is not None and not arguments.price >= 0:
        raise ValueError(f"--price must not be negative, got {arguments.price}")
    limits = parse(arguments.slo) if arguments.slo else []
    traffic = read_traffic(arguments.traffic)
    footprint = _footprint(arguments.model, options)
    quantization = options.get("quantization")
    if quantization is not None and quantization not in footprint.quantizations:
        known = ", ".join(str(name) for name in footprint.quantizations if name) or "none: it is quantized already"
        raise ValueError(f"quantization={quantization!r} is not known for this model; there is {known}")
    fitted = None
    count = 1
    if arguments.fit is not None:
        fit = read_fit(arguments.fit, footprint, quantization)
        device = _this_machine(fit)
        options = {**_options_of(fit), **options}
        fitted = Fitted(fit), fit.blocks * fit.block_size // options["block_size"]
    else:
        device, count = parse_devices(arguments.gpus)
    engine = _engine_options(options, footprint, traffic.longest, device.kind.is_gpu)
    return Task(
        footprint, device, engine, quantization, traffic, limits, arguments.price, not arguments.no_search, fitted
    ), count


def _footprint(model: str | None, options: dict[str, Any]) -> "Footprint":
    from quire.cli.models.lookup import look_up

    facts, place, _ = look_up(model, options)
    if facts.footprint is None or (facts.problem is not None and facts.format != "no weights"):
        raise ValueError(f"{place}: {facts.problem or f'it is {facts.purpose}, and not a whole model'}")
    if not facts.footprint.generates:
        raise ValueError(f"{place}: it makes {facts.purpose}, and plans are for models that generate text")
    if facts.footprint.spec.has_states:
        raise ValueError(f"{place}: it has recurrent layers, and plans know the times of attention only")
    return facts.footprint


def _engine_options(options: dict[str, Any], footprint: "Footprint", longest: int, gpu: bool) -> "EngineOptions":
    """Uses the defaults of quire serve, but max_model_len defaults to the traffic's longest request."""
    from quire.planner.memory import EngineOptions

    given = {name: options[name] for name in _SCHEDULER_FLAGS if name in options}
    scheduler = SchedulerConfig(**given)
    cache = CacheConfig(**{n: options[n] for n in _CACHE_FLAGS if n in options})
    positions = footprint.spec.max_positions
    max_model_len = options.get("max_model_len") or longest
    if max_model_len > positions:
        why = "" if "max_model_len" in options else ", as a request of the traffic needs,"
        raise ValueError(f"max_model_len={max_model_len}{why} is more than the {positions} positions of the model")
    if longest > max_model_len:
        raise ValueError(f"max_model_len={max_model_len} is too small: a request of the traffic has {longest} tokens")
    return EngineOptions(
        max_model_len,
        scheduler.max_num_seqs,
        scheduler.tokens_of_a_step(gpu),
        cache.block_size,
        cache.gpu_memory_utilization,
        _BYTES.get(cache.kv_cache_dtype),
    )


def _this_machine(fit: "Fit") -> Any:
    from quire.planner.devices import KINDS, Device
    from quire.platform.limits import free_on_host

    return Device(fit.machine, free_on_host(), 1.0, {"bf16": 1.0}, 1.0, KINDS["cpu"])


def _options_of(fit: "Fit") -> dict[str, Any]:
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens")
    return {name: getattr(fit, name) for name in names}


def _with_progress(results: "Iterable[Result]", total: int) -> "Iterable[Result]":
    from tqdm import tqdm

    return tqdm(results, "simulating layouts", total, leave=False, disable=not sys.stderr.isatty())


def _devices() -> str:
    from quire.planner.devices import DEVICES
    from quire.planner.report import table

    rows = [("--gpus", "device", "memory", "bandwidth", "16-bit products")]
    rows += [
        (
            name,
            device.name,
            f"{device.memory / 2**30:g} GiB",
            f"{device.bandwidth / 1e12:g} TB/s",
            f"{device.rates['bf16'] / 1e12:g} TFLOP/s",
        )
        for name, device in DEVICES.items()
    ]
    return table(rows, "")


def _measure(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    if arguments.measured is None:
        raise ValueError("--output is missing: the file for what is measured")
    if not arguments.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {arguments.seconds}")
    footprint = _footprint(arguments.model, options)
    from quire.planner.fitted import Fitted, write_fit
    from quire.planner.measure import measured_fit, table  # imports torch

    fit = measured_fit(arguments.model, options, footprint, arguments.seconds)
    write_fit(arguments.measured, fit)
    print(table(fit, Fitted(fit)))
    return 0
