"""The sections of first_contact.py: contact_sections.py OUT [--stand-in TARGET] SECTION prints results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(ROOT), str(BENCHMARKS)]

import gpu_suite  # noqa: E402  # a program of its own, which finds its neighbours by the path above

BATCHES = ((1, 320), (32, 576), (256, 576))  # requests, and their average number of tokens
LONG = 65_536  # tokens of the one long request among short ones
PREFILL = 8_192
SHAPE = "llama-3-8b"
OP_TESTS = (
    "tests/ops/test_triton.py",
    "tests/ops/test_triton_linear.py",
    "tests/ops/test_triton_dense.py",
    "tests/ops/test_triton_float8.py",
    "tests/ops/test_triton_lora.py",
    "tests/attention/test_triton_attention.py",
)
SANITIZED = (  # a few cases of each kind of kernel: each launch takes ten times as long or more
    "tests/ops/test_triton.py::test_norms",
    "tests/ops/test_triton.py::test_products_of_eight_bits_are_those_of_rounded_inputs",
    "tests/ops/test_triton_linear.py::test_products_with_float8_round_the_inputs_to_float8",
    "tests/attention/test_triton_attention.py::test_shapes",
)


class Contact:
    """out: the folder of the results. target: of the simulated card; None on a real one."""

    def __init__(self, out: Path, target: str | None) -> None:
        import torch

        self.out = out
        self.target = target
        self.device = torch.device("cuda", 0)

    @property
    def few(self) -> bool:
        """Whether to run few tokens, in a rehearsal."""
        return self.target is not None

    @property
    def results(self) -> gpu_suite.Results:
        saved = self.out / "first-contact.json"
        return json.loads(saved.read_text()) if saved.exists() else {}

    # ---- does it start

    def start(self) -> dict[str, Any]:
        """Versions, imports, and one launch of torch and of Triton."""
        import torch

        result: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
        result["c_compiler"] = shutil.which("gcc") or shutil.which("clang")
        for package in ("torch", "triton", "transformers", "numpy", "msgspec"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                result[package] = importlib.metadata.version(package)
        gpu_suite.tell(result)
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")
        result["device"] = torch.cuda.get_device_name(self.device)
        result["capability"] = list(torch.cuda.get_device_capability(self.device))
        gpu_suite.tell(result)
        from quire.ops import HAS_TRITON, OPS

        if not HAS_TRITON:
            raise RuntimeError("Triton cannot be used; see the log")
        op = OPS["silu_and_mul"]
        kernel = next(i.function for i in op.implementations if i.name == "triton")
        x = torch.randn(3, 64, device=self.device, dtype=torch.bfloat16)
        started = time.perf_counter()
        difference = (kernel(x) - op.reference(x)).abs().max().item()
        result["first_launch_s"] = time.perf_counter() - started
        if not difference < 0.05:
            raise RuntimeError(f"the first kernel is wrong by {difference}")
        return result

    def kernel_cache(self) -> dict[str, Any]:
        """Compile the kernels of the following sections beforehand, in eight processes."""
        import torch

        from quire.platform.gpu.cards import card_of

        card = card_of(self.device)
        target = self.target or f"sm_{card.capability}:{card.processors}"
        tiny = ["--max-model-len", "512", "--max-num-seqs", "16"]
        large = ["--max-model-len", "4096"]
        with tempfile.TemporaryDirectory() as folder:
            model = str(_write(Path(folder) / "bf16"))
            float8 = str(_write(Path(folder) / "fp8", "fp8"))
            variants = {
                "8B": [model, *large],
                "8B, one": [model, *large, "--max-num-seqs", "1"],
                "8B, fp8": [float8, *large],
                "8B, fp8 cache": [model, *large, "--kv-cache-dtype", "fp8"],
                "8B, int8": [model, *large, "--quantization", "int8"],
                "8B, eager": [model, *large, "--enforce-eager"],
                "bundled, float32": ["--dtype", "float32", *tiny],
                "bundled": tiny,
            }
            if self.few:
                variants = {"bundled": tiny}
            torch.cuda.empty_cache()
            command = [sys.executable, "-m", "quire", "compile", "--target", target]
            with ThreadPoolExecutor(8) as pool:
                codes = dict(zip(variants, pool.map(partial(_call, command), variants.values()), strict=True))
        failures = {name: f"quire compile ended with {code}" for name, code in codes.items() if code}
        return {"failures": failures, "compiled": len(codes) - len(failures)}

    # ---- is it right

    def op_tests(self) -> dict[str, Any]:
        """The tests of the Triton kernels, on the card instead of in the interpreter."""
        return self._tests([], ["-n6", "--maxfail", "20", *OP_TESTS])

    def sanitizer(self) -> dict[str, Any]:
        """Some of them under compute-sanitizer, which finds addresses outside of allocations. Each tensor is an
        allocation of its own."""
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None and not self.few:
            return {"skipped": "there is no compute-sanitizer"}
        checked = [] if self.few else [str(tool), "--tool", "memcheck", "--error-exitcode", "9"]
        return self._tests(checked, ["-n0", "--maxfail", "5", *SANITIZED], PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    def _tests(self, tool: list[str], arguments: list[str], **variables: str) -> dict[str, Any]:
        """Run tests. tool: the command that runs the interpreter. variables: of their environment."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly"]
        if self.few:
            command += ["-n0", "--collect-only"]
        done = subprocess.run(
            [*tool, *command, *arguments],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout[-6000:], file=sys.stderr, flush=True)
        failed = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        failures = dict.fromkeys(failed, "failed; see the log")
        if done.returncode and not failures:
            failures["pytest"] = f"ended with exit code {done.returncode}"
        return {"failures": failures}

    def greedy(self, **options: Any) -> dict[str, Any]:
        import gpu_checks

        return gpu_suite._checked([("the tokens of transformers", lambda: gpu_checks.greedy("cuda", **options))])

    # ---- how fast is it

    def shapes(self, quantization: str | None = None) -> dict[str, Any]:
        """Decoding of 1, 32 and 256 requests, a long prompt, and a long request among short ones."""
        import gpu_figures as figures

        from benchmarks.gpu.kernels import decoding_steps

        result: dict[str, Any] = {"kernels": {}}
        longest = 4096 if self.few else LONG + 1024
        with tempfile.TemporaryDirectory() as folder:
            path = _write(Path(folder), quantization)
            options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 256}
            llm, result["start_s"] = figures.start(path, "cuda", **options)
            result["kv_blocks"] = llm.core.executor.kv_cache.num_blocks
            result["graphs"] = llm.core.executor.runner.forward.num_graphs
            if not result["graphs"]:
                result["failures"] = {"CUDA graphs": "none were captured; see the log"}
            gpu_suite.tell(result)
            name = SHAPE if quantization is None else f"{SHAPE} {quantization}"
            for requests, context in BATCHES:
                case = {1: "one stream"}.get(requests, f"{requests} requests")
                if self.few:
                    requests, context = min(requests, 4), 40
                trace = None if quantization else self.out / f"trace-{case.replace(' ', '-')}.json"
                kernels = decoding_steps(llm, requests, context, 8, trace)
                if trace is not None:
                    compress(trace)
                result["kernels"][f"{name}, {case}"] = kernels
                result[f"{case}, step ms"] = 1e3 * step_seconds(llm, [context] * requests, 4 if self.few else 32)
                gpu_suite.tell(result)
            if quantization is None:
                result["prefill 8K ms"] = 1e3 * self._prefill(llm)
                gpu_suite.tell(result)
                result |= self._skewed(llm)
            llm.shutdown()
        return result

    def _prefill(self, llm: Any) -> float:
        from quire import SamplingParams

        length = 1024 if self.few else PREFILL
        times = []
        for i in range(3):
            started = time.perf_counter()
            prompt = [11 + i] + [7 + j % 1000 for j in range(length - 1)]
            llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            times.append(time.perf_counter() - started)
        return min(times)

    def _skewed(self, llm: Any) -> dict[str, Any]:
        """Compare the steps of 255 short requests and a long one with those of requests that are equally long
        together."""
        count, short, long = (4, 40, 2048) if self.few else (256, 320, LONG)
        steps = 4 if self.few else 16
        skewed = step_seconds(llm, [long, *[short] * (count - 1)], steps)
        even = step_seconds(llm, [(long + short * (count - 1)) // count] * count, steps)
        return {"skewed step ms": 1e3 * skewed, "even step ms": 1e3 * even, "skewed / even": skewed / even}

    def libraries(self) -> dict[str, Any]:
        """Quire's own kernels beside those of libraries: products, and the attention of decoding and of prompts."""
        import gpu_figures as figures

        result = figures.products(self.device, self.few)
        gpu_suite.tell(result)
        return result | figures.attention(self.device, self.results.get("machine", {}), self.few)

    def tiles(self) -> dict[str, Any]:
        return gpu_suite._tiles(self.device, self.results, False)

    # ---- does it serve

    def two_ranks(self) -> dict[str, Any]:
        import gpu_checks

        return gpu_suite._checked([("the text of one rank", lambda: gpu_checks.two_ranks("cuda"))])

    def http(self) -> dict[str, Any]:
        """A burst of requests to a server. In a rehearsal, the server runs on the CPU."""
        import socket

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--max-model-len", "512"]
        command += ["--device", "cpu" if self.few else "cuda"]
        count = 16 if self.few else 128
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=sys.stderr) as server:
            try:
                _wait_until_healthy(f"http://127.0.0.1:{port}/health", server)
                result: dict[str, Any] = {"ready_s": time.perf_counter() - started}
                started = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    lengths = list(pool.map(partial(_complete, port), range(count)))
                result |= {"burst_s": time.perf_counter() - started, "output_tokens": sum(lengths)}
                wrong = sum(length != 32 for length in lengths)
                result["failures"] = {"a burst": f"{wrong} answers are too short"} if wrong else {}
            finally:
                server.terminate()
        return result


def step_seconds(llm: Any, lengths: list[int], steps: int) -> float:
    """Seconds of a decoding step of requests with prompts of these lengths."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2 * len(lengths) + steps + 16, ignore_eos=True)
    streams = [llm.stream([9 + i % 1000] * length, params) for i, length in enumerate(lengths)]
    for _ in range(4):  # all prompts are computed
        for stream in streams:
            next(stream)
    started = time.perf_counter()
    for _ in range(steps):
        for stream in streams:
            next(stream)
    seconds = (time.perf_counter() - started) / steps
    for stream in streams:
        stream.close()
    return seconds


def _write(folder: Path, quantization: str | None = None) -> Path:
    """A checkpoint of the shape without weights."""
    from benchmarks.gpu.shapes import FORMATS, SHAPES, write_config

    config = dict(SHAPES[SHAPE])
    if quantization is not None:
        config["quantization_config"] = FORMATS[quantization]
    return write_config(folder, config)


def _call(command: list[str], arguments: list[str]) -> int:
    return subprocess.run([*command, *arguments], stdout=sys.stderr, check=False).returncode


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with exit code {server.returncode}")


def _complete(port: int, number: int) -> int:
    """The number of tokens that a completion has."""
    body = {"prompt": f"{number} and so on", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.loads(answer.read())["usage"]["completion_tokens"])


def compress(trace: Path) -> None:
    """Replace a Chrome trace by its compressed form, which viewers open as well."""
    with trace.open("rb") as source, gzip.open(f"{trace}.gz", "wb", 6) as target:
        shutil.copyfileobj(source, target)
    trace.unlink()


def sections(contact: Contact) -> dict[str, Callable[[], dict[str, Any]]]:
    suite = partial(gpu_suite.run_section, small=False, few=contact.few, results={})
    return {
        "start": contact.start,
        "machine": partial(suite, "machine"),
        "kernel cache": contact.kernel_cache,
        "kernels": partial(suite, "kernels"),
        "attention kernels": partial(suite, "attention kernels"),
        "op tests": contact.op_tests,
        "eager": partial(contact.greedy, enforce_eager=True, async_scheduling=False),
        "graphs": partial(contact.greedy, require_cuda_graphs=True, async_scheduling=False),
        "two steps in flight": contact.greedy,
        "8B": contact.shapes,
        "fp8": partial(contact.shapes, "fp8"),
        "libraries": contact.libraries,
        "tiles": contact.tiles,
        "two ranks": contact.two_ranks,
        "http": contact.http,
        "sanitizer": contact.sanitizer,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("section")
    parser.add_argument("--stand-in")
    a = parser.parse_args()
    on_cpu = a.section in ("kernel cache", "op tests", "http", "sanitizer")  # they start processes of their own
    with gpu_suite._stand_in(a.stand_in):
        if a.stand_in and on_cpu:
            os.environ.pop("TRITON_INTERPRET", None)
        gpu_suite.tell(sections(Contact(a.out, a.stand_in))[a.section]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
