"""Measures a server with many models: requests drawn by Zipf's law, beside models that stay loaded; and loading again.

    python benchmarks/many_models.py CHECKPOINT [--models 20] [--requests 200] [--clients 8] [--memory 8G]
        [--tokens 16] [--exponent 1.0] [--loads 5] [--options ...]

Each model is a copy of the checkpoint. The same requests are then sent to as many models as were in memory in the end:
those for other models go to these, so nothing is loaded. This is the throughput of the best static assignment. The last
part unloads a model and measures the time until its first token, with the files in the page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp


@dataclass
class Run:
    """The results of one series of requests. latencies: in seconds. statuses: how many requests had each."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def row(self, name: str) -> str:
        ordered = sorted(self.latencies)
        middle, late = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
        failed = sum(count for status, count in self.statuses.items() if status != 200)
        return f"| {name} | {self.rate:.2f} | {middle:.2f} s | {late:.2f} s | {failed} |"


class Server:
    """`quire serve` with the models of a folder. Its log is beside the folder."""

    def __init__(self, folder: Path, memory: str, options: list[str]) -> None:
        arguments = ["--models-dir", str(folder), "--memory", memory, "--port", "0", "--response-store", "memory"]
        log = folder.with_suffix(".log")
        with log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "quire", "serve", *arguments, *options], stderr=file)
        while (found := re.search(r"Serving at (\S+): ", log.read_text())) is None:
            if self.process.poll() is not None:
                sys.exit(f"the server did not start: {log.read_text()}")
            time.sleep(0.1)
        self.url = found[1]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


async def run_all(client: aiohttp.ClientSession, models: list[str], clients: int, tokens: int) -> Run:
    """Send a request for each model in the list, with this many at a time."""
    run = Run()
    remaining = iter(enumerate(models))

    async def work() -> None:
        for number, model in remaining:
            body = {"model": model, "prompt": f"{number} times upon a time", "max_tokens": tokens, "ignore_eos": True}
            began = time.perf_counter()
            async with client.post("/v1/completions", json=body) as answer:
                await answer.read()
            run.latencies.append(time.perf_counter() - began)
            run.statuses[answer.status] += 1

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    run.seconds = time.perf_counter() - began
    return run


async def loaded(client: aiohttp.ClientSession) -> list[str]:
    async with client.get("/models") as answer:
        listed = (await answer.json())["data"]
    return [entry["id"] for entry in listed if entry["status"]["value"] == "loaded"]


async def loads(client: aiohttp.ClientSession) -> int:
    async with client.get("/metrics") as answer:
        text = await answer.text()
    return sum(int(float(n)) for n in re.findall(r"^quire:model_load_seconds_count\{.*\} (\S+)$", text, re.MULTILINE))


async def load_again(client: aiohttp.ClientSession, model: str) -> float:
    """Return the seconds from a request for an unloaded model to its first token."""
    async with client.post("/models/unload", json={"model": model}) as answer:
        await answer.read()
    while model in await loaded(client):
        await asyncio.sleep(0.05)
    body = {"model": model, "prompt": "Once", "max_tokens": 4, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    async with client.post("/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                return time.perf_counter() - began
    raise AssertionError("the stream had no token")


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    names = [f"model-{number:02}" for number in range(arguments.models)]
    for name in names:
        shutil.copytree(arguments.checkpoint.resolve(), folder / name, copy_function=os.symlink)
    weights = [1 / (rank + 1) ** arguments.exponent for rank in range(len(names))]
    drawn = random.Random(0).choices(names, weights, k=arguments.requests)
    server = Server(folder, arguments.memory, arguments.options)
    try:
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(600)) as client:
            dynamic = await run_all(client, drawn, arguments.clients, arguments.tokens)
            count = await loads(client)
            kept = await loaded(client)
            static = await run_all(
                client, [kept[names.index(name) % len(kept)] for name in drawn], arguments.clients, arguments.tokens
            )
            again = [await load_again(client, names[0]) for _ in range(arguments.loads)]
    finally:
        server.stop()
    report(arguments, dynamic, static, count, len(kept), len(set(drawn)), again)


def report(arguments: argparse.Namespace, dynamic: Run, static: Run, *figures: Any) -> None:
    count, kept, different, again = figures
    print(f"{platform.machine()}, {os.cpu_count()} processors, checkpoint {arguments.checkpoint.name}")
    print(
        f"{arguments.requests} requests for {different} of {arguments.models} models, {arguments.tokens} tokens each,"
    )
    print(f"{arguments.clients} at a time, in {arguments.memory}; {count} loads, {kept} models in memory in the end\n")
    print("| models | requests/s | median | 95th percentile | failures |\n|---|---|---|---|---|")
    print(dynamic.row("loaded on demand"))
    print(static.row(f"{kept} that stay loaded"))
    print(f"\nof the static throughput: {dynamic.rate / static.rate:.0%}")
    if again:
        times = ", ".join(f"{seconds:.2f}" for seconds in sorted(again))
        print(f"first token of a model that is loaded again: median {statistics.median(again):.2f} s ({times})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--memory", default="8G")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of quire serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments, Path(folder) / "models"))


if __name__ == "__main__":
    main()
