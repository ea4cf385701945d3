"""Measures this machine's limits with ceilings.cpp: how fast it can read memory and multiply.

    python benchmarks/ceilings.py [--threads 2]
    python benchmarks/ceilings.py --start-of MODEL       # import torch and read the weights: the floor of starting
    python benchmarks/ceilings.py --weights-of MODEL [--quantization int8, or any engine flag]

--weights-of: loads the model into Quire and reads its weights in place, interleaved with decoding one stream, since the
rate changes within minutes. Each prints a line of JSON.

hop_ns is the time that a cache line takes from one core to another. On processors with chiplets, it shows where the
host of a virtual machine has placed its processors, which may change at any time: about 30 ns if both are on one
chiplet and share its link to memory, or more than 100 ns if they are on two chiplets with separate links.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import PREFILL_SEED, SEED, single

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
COMPILER = os.environ.get("CXX", "g++")
REGION = 1 << 30
REGIONS = 4
PASSES = 5
STREAMS = (1, 2, 4)
PRODUCTS = {"float32_gflop_s": 0, "bf16_gflop_s": 1, "int8_gop_s": 2}  # and ceilings.cpp's number of each


@cache
def library() -> ctypes.CDLL:
    """ceilings.cpp, compiled into the user's cache if necessary."""
    from platformdirs import user_cache_path

    source = Path(__file__).with_suffix(".cpp")
    features = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))]
    facts = "\0".join([source.read_text(), COMPILER, *FLAGS, *features[:1]])
    path = user_cache_path("quire") / "benchmarks" / f"{hashlib.sha256(facts.encode()).hexdigest()}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *FLAGS, str(source), "-o", str(temporary)], check=True)
        temporary.replace(path)
    loaded = ctypes.CDLL(str(path))
    loaded.quire_allocate.restype = ctypes.c_void_p
    loaded.quire_allocate.argtypes = [ctypes.c_int64, ctypes.c_int32]
    loaded.quire_free.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.quire_read.restype = loaded.quire_product_rate.restype = loaded.quire_hop.restype = ctypes.c_double
    loaded.quire_hop.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64]
    loaded.quire_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
    loaded.quire_product_rate.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64]
    return loaded


def read_rates(regions: list[tuple[int, int]], threads: int, passes: int) -> dict[int, list[float]]:
    """GB/s of reading the regions (address, bytes) `passes` times, by the number of streams in which a thread reads."""
    addresses = (ctypes.c_void_p * len(regions))(*(address for address, _ in regions))
    sizes = (ctypes.c_int64 * len(regions))(*(size for _, size in regions))
    total = sum(size for _, size in regions)
    rates: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    for streams in (*STREAMS[:1], *STREAMS * passes):  # the first warms up
        seconds = library().quire_read(addresses, sizes, len(regions), threads, streams)
        rates[streams].append(total / seconds / 1e9)
    rates[STREAMS[0]].pop(0)
    return rates


def hop_ns(ways: int = 2_000) -> float:
    """Return the median of five times that a cache line takes from the first processor to the second. 0 if there is
    only one processor, or no compiler.
    """
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2 or shutil.which(COMPILER) is None:
        return 0.0
    return round(median(library().quire_hop(*processors[:2], ways) * 1e9 for _ in range(5)), 1)


def fastest(rates: dict[int, list[float]]) -> list[float]:
    """Return the rates with the best number of streams."""
    return max(rates.values(), key=median)


def measure(threads: int, region: int = REGION, regions: int = REGIONS, rounds: int = 30_000_000) -> dict[str, Any]:
    """Return rates in 1e9 per second. Reading: median and best over several regions, which exist at the same time, so
    that they use different memory. Products: best of five.
    """
    addresses = [library().quire_allocate(region, threads) for _ in range(regions)]
    if not all(addresses):
        raise MemoryError(f"{regions} regions of {region} bytes cannot be had")
    rates = [rate for address in addresses for rate in fastest(read_rates([(address, region)], threads, PASSES))]
    for address in addresses:
        library().quire_free(address, region)
    result = {
        "threads": threads,
        "hop_ns": hop_ns(),
        "read_gb_s": round(median(rates), 2),
        "read_best_gb_s": round(max(rates), 2),
    }
    for name, kind in PRODUCTS.items():
        products = [library().quire_product_rate(kind, threads, rounds) for _ in range(5)]
        result[name] = round(max(products) / 1e9, 1)
    return result


def read_for_start(model: Path) -> dict[str, Any]:
    import numpy as np
    import torch

    contents = [np.fromfile(path, np.uint8) for path in model.glob("*.safetensors")]
    size = sum(content.nbytes for content in contents)
    return {"engine": "torch", "version": torch.__version__, "weights_gb": round(size / 1e9, 3)}


# ---- Quire's own weights


def weights(model: Any) -> list[tuple[int, int]]:
    """(address, bytes) of a Decoder's tensors except its KV cache; each piece of memory once."""
    found: dict[int, int] = {}
    for tensor in _tensors(model, set()):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return [(address, size) for address, size in found.items() if size >= 4096]


def _tensors(thing: Any, seen: set[int]) -> Iterator[Any]:
    import torch

    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _tensors(value, seen)
    elif type(thing).__module__.startswith("quire.") and hasattr(thing, "__dict__"):
        for name, value in vars(thing).items():
            if name not in ("cache", "backend", "rotary"):
                yield from _tensors(value, seen)


def measure_weights(model: str | None, options: dict[str, Any], threads: int, rounds: int = 3) -> dict[str, Any]:
    """Load the model into Quire. Return the GB/s of reading its weights, and the rate at which it
    decodes one stream.
    """
    from quire import LLM, SamplingParams, __version__

    llm = LLM(model, **options)
    regions = weights(llm.core.executor.runner.model)

    def seconds(seed: int, output_len: int) -> float:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
        started = time.perf_counter()
        llm.generate(single(seed)[0][0], params, use_tqdm=False)
        return time.perf_counter() - started

    output_len = single()[0][1]
    seconds(SEED, 8)
    rates: list[float] = []
    decode: list[float] = []
    hops: list[float] = []
    for _ in range(rounds):
        hops.append(hop_ns())
        rates += fastest(read_rates(regions, threads, PASSES))
        llm.reset_prefix_cache()
        prefill_s = seconds(PREFILL_SEED, 1)
        decode.append((output_len - 1) / (seconds(SEED, output_len) - prefill_s))
    return {
        "engine": "quire",
        "version": __version__,
        "weights_gb": round(sum(size for _, size in regions) / 1e9, 3),
        "hop_ns": median(hops),
        "read_gb_s": round(median(rates), 2),
        "decode_tok_s": round(median(decode), 2),
    }


def _engine_options(flags: list[str]) -> dict[str, Any]:
    from quire.cli.flags import add_engine_flags, engine_options

    parser = argparse.ArgumentParser()
    parser.set_defaults(model=None)
    add_engine_flags(parser)
    return engine_options(parser.parse_args(flags))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--start-of", type=Path, metavar="MODEL")
    parser.add_argument("--weights-of", metavar="MODEL")
    arguments, engine_flags = parser.parse_known_args()
    if engine_flags and not arguments.weights_of:
        parser.error(f"{' '.join(engine_flags)}: only with --weights-of")
    if arguments.start_of:
        result = read_for_start(arguments.start_of)
    elif arguments.weights_of:
        result = measure_weights(arguments.weights_of, _engine_options(engine_flags), arguments.threads)
    else:
        result = measure(arguments.threads)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
