"""Measures how long open streams stall when a process of the engine is lost.

`python benchmarks/recovery.py` starts `quire serve` with the bundled model, opens 16 streams, and kills or stops the
core or a rank. It prints for each case the longest pause of a stream, as the sum of its gaps of more than 0.3 s, and
how many seconds after the signal the log reports the loss and the restart.

    python benchmarks/recovery.py --case core-kill
    python benchmarks/recovery.py --case rank-kill --model DIR
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

CASES = {
    "core-kill": ([], "core", signal.SIGKILL),
    "core-stop": ([], "core", signal.SIGSTOP),
    "rank-kill": (["--tensor-parallel-size", "2"], "rank", signal.SIGKILL),
    "rank-stop": (["--tensor-parallel-size", "2"], "rank", signal.SIGSTOP),
    "core-of-ranks-kill": (["--tensor-parallel-size", "2"], "core", signal.SIGKILL),
}
GAP = 0.3  # seconds
_EVENTS = ("was lost", "go on", "loaded in", "runs again")


@dataclass
class Served:
    """A server in its own process. lines: log lines, each with its time."""

    arguments: list[str]
    url: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __enter__(self) -> "Served":
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", *self.arguments, "--port", "0"], stderr=subprocess.PIPE, text=True
        )
        ready = threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append((time.monotonic(), line.rstrip()))
                if found := re.search(r"Serving at (\S+): ", line):
                    self.url = found[1]
                    ready.set()
            ready.set()

        threading.Thread(target=read, daemon=True).start()
        ready.wait()
        if not self.url:
            raise SystemExit("the server did not start:\n" + "\n".join(line for _, line in self.lines))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def find(self, kind: str) -> int:
        """Return the process id of the core, or of the last rank."""
        core = next(pid for pid in _children(self.process.pid) if "resource_tracker" not in _command(pid))
        if kind == "core":
            return core
        return max((pid for pid in _children(core) if "quire.executor.rank" in _command(pid)), key=_command)


def _children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().replace("\0", " ").strip()


async def _stream(client: aiohttp.ClientSession, number: int, tokens: int, times: list[float]) -> None:
    body = {
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with client.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise SystemExit(f"a stream failed: {event}")
                times.append(time.monotonic())


async def _measure(server: Served, case: str, streams: int, tokens: int) -> None:
    _, kind, number = CASES[case]
    all_times: list[list[float]] = [[] for _ in range(streams)]
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=None)) as client:
        running = [asyncio.create_task(_stream(client, index, tokens, times)) for index, times in enumerate(all_times)]
        while min(map(len, all_times)) < 10:
            await asyncio.sleep(0.01)
        killed = time.monotonic()
        os.kill(server.find(kind), number)
        await asyncio.gather(*running)
    gaps = [sum(b - a for a, b in pairwise(times) if b - a > GAP and b > killed) for times in all_times]
    print(f"{case:20} {max(gaps):6.2f} s")
    for at, line in server.lines:
        if at > killed and any(event in line for event in _EVENTS):
            print(f"    {at - killed:6.2f} s  {line[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), nargs="*", default=list(CASES))
    parser.add_argument("--model", default=None, help="default: the bundled model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--option", nargs="*", default=[], help="further arguments of quire serve")
    options = parser.parse_args()
    for case in options.case:
        model = [] if options.model is None else [options.model]
        with Served([*model, *CASES[case][0], *options.option]) as server:
            asyncio.run(_measure(server, case, options.streams, options.tokens))


if __name__ == "__main__":
    main()
