"""Compile a model's kernels for GPUs and processors that need not be present, for instance when building an image.
quire serve with the same options then compiles nothing. All options of quire serve are accepted. No weights are read,
except those of a GGUF file.
"""  # the description of the command in its help

import argparse
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from quire.cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire.cli.model import add_model
from quire.config.engine import ConfigError, EngineConfig, ServerConfig
from quire.messages.errors import error_text
from quire.observability.logging import configure_logging, logger
from quire.platform.folders import cache_folder
from quire.platform.gpu.cards import CARDS, Card

HELP = "compile the kernels of a model for GPUs and processors that need not be present"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    add_model(parser)
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET",
        type=_target,
        help=f"GPU to compile for: {', '.join(CARDS)}; sm_90:114 is one with 114 processors; may be repeated",
    )
    parser.add_argument(
        "--cpu",
        action="append",
        default=[],
        metavar="NAME",
        type=_cpu,
        help="processor to compile the CPU kernels for: native is this machine's; an instruction set: amx, "
        "avx512-bf16, avx512-vnni, avx512, avx-vnni, avx2, neon-bf16, neon-dotprod, neon; or gcc's name of a "
        "processor: sapphirerapids, neoverse-v2, ...; may be repeated",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the kernels; quire serve reads them from $XDG_CACHE_HOME/quire or ~/.cache/quire "
        "(default: that folder)",
    )
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def _target(text: str) -> str:
    _card(text)
    return text


def _card(target: str) -> Card:
    """Return the card of a target: "sm_90", or "sm_90:114" for one with 114 processors."""
    name, _, processors = target.partition(":")
    if name not in CARDS:
        raise argparse.ArgumentTypeError(f"unknown target {name!r}; known are: {', '.join(CARDS)}")
    if not processors:
        return CARDS[name]
    if not processors.isdecimal() or not int(processors):
        raise argparse.ArgumentTypeError(f"{target!r}: the number of processors must be an integer of at least 1")
    return replace(CARDS[name], processors=int(processors))


def _cpu(name: str) -> str:
    from quire.ops.cpu.processor import INSTRUCTION_SETS, PROCESSORS

    known = dict(zip(INSTRUCTION_SETS, INSTRUCTION_SETS, strict=True)) | PROCESSORS
    if name not in known:
        raise argparse.ArgumentTypeError(f"unknown processor {name!r}; known are: {', '.join(known)}")
    return known[name]


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    ServerConfig.create(**server_options(arguments))  # reports options that quire serve would refuse
    EngineConfig.create(model=arguments.model, **options)
    if not arguments.target and not arguments.cpu:
        raise ValueError("nothing to compile: give --target for a GPU, such as --target sm_90, or --cpu")
    folder = arguments.output or cache_folder()
    if folder is None:
        raise ValueError("this user has no home folder for the kernels; give --output")
    folder = Path(folder).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(arguments.cpu):
        _compile_for_cpu(name, folder)
    for target in dict.fromkeys(arguments.target):
        # The kernels are selected at import, so each target needs its own process.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            is_default = arguments.output is None
            job = process.submit(
                compile_for_gpu, target, arguments.model, options, folder, is_default, arguments.log_level
            )
            job.result()
    return 0


def _compile_for_cpu(name: str, folder: Path) -> None:
    from quire.ops.cpu.build import compile_for

    started = time.perf_counter()
    path = compile_for(name, folder / "kernels")
    seconds = time.perf_counter() - started
    logger.info("CPU kernels for %s: %s, %s in %.1f s", name, path, _size(path.stat().st_size), seconds)


def compile_for_gpu(
    target: str, model: str | None, options: dict[str, Any], folder: Path, is_default: bool, log_level: str
) -> None:
    """Start a worker on a simulated GPU, as quire serve would on the card, but with dummy weights.

    For the process of one target. is_default: whether quire serve finds the folder without options. Raises ConfigError
    and ModelNotFoundError, like an engine's start.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    configure_logging(log_level)
    warnings.simplefilter("ignore")  # torch's, about tensors without memory
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"Triton, which compiles kernels for GPUs, cannot be imported ({error_text(error)}); install the version "
            "of the machine with the GPU, for example with: pip install triton==3.6.0"
        ) from error
    from quire.cli.simulated_gpu import stand_in
    from quire.models.description import describe
    from quire.models.heads.resolve import with_files
    from quire.parallel.mesh import Communicator, Mesh

    started = time.perf_counter()
    card = _card(target)
    chosen = {**options, "device": "cuda", "load_format": "dummy", "cpu_isa": "native"}
    config, directory = with_files(EngineConfig.create(model=model, **chosen))
    max_model_len = describe(directory, config.model).max_model_len
    logger.info("Compiling for %s (%s) with Triton %s", target, card.name, triton.__version__)
    with stand_in(card) as device:
        from quire.ops import HAS_TRITON, launchers

        if not HAS_TRITON:
            raise ConfigError("quire compile --target needs a C compiler: install gcc or clang")
        from quire.ops.triton.cache import use_folder
        from quire.worker.worker import Worker

        if not is_default:
            use_folder(folder)
        triton.knobs.compilation.store_binary_only = True  # the intermediate code takes ten times as much space
        size = config.parallel.tensor_parallel_size
        dcp = config.parallel.decode_context_parallel_size
        context = Communicator(0, config.parallel.prefill_context_parallel_size)
        for rank in sorted({0, size - 1}):  # the last rank's parts of the layers may be smaller
            mesh = Mesh(rank, cp=context, tp=Communicator(rank, size), dcp=Communicator(rank % dcp, dcp))
            Worker(config, directory, max_model_len, mesh)
        if card.backend == "cuda":
            try:
                count = launchers.compile_launchers(device.kernels.values(), folder)
                logger.info("%s: %d new launchers", target, count)
            except (OSError, RuntimeError) as error:
                logger.warning(
                    "The machine with the GPU will need a C compiler to launch kernels: %s", error_text(error)
                )
    logger.info(
        "%s: %d kernels, of which %d were compiled and the others were in the cache, in %.0f s; %s holds %s",
        target,
        device.num_loaded,
        len(device.cache_misses),
        time.perf_counter() - started,
        triton.knobs.cache.dir,
        _size(_bytes_below(Path(triton.knobs.cache.dir))),
    )


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
