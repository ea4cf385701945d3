"""Measures how much ten viewers of the page cost a server under load.

    python -m benchmarks.page_cost --rounds 5

A server with the bundled model answers the same requests twice in each round: once without viewers, and once while ten
clients follow the stream of the page's engine view. It measures the CPU seconds of all processes of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
import urllib.request
from statistics import median

import psutil

PORT = 8391
VIEWERS = 10
URL = f"http://127.0.0.1:{PORT}"


async def work(requests: int, tokens: int) -> None:
    import aiohttp

    limit = asyncio.Semaphore(16)
    async with aiohttp.ClientSession() as session:

        async def ask(number: int) -> None:
            prompt = f"Story {number}. Once upon a time there was a fox who lived near a river. " * 4
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
            async with limit, session.post(f"{URL}/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.read()

        await asyncio.gather(*(ask(number) for number in range(requests)))


async def look(seconds: float) -> None:
    """Run the viewers in a separate process."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:

        async def follow() -> int:
            size = 0
            try:
                async with session.get(f"{URL}/ui/events") as stream:
                    async for part in stream.content.iter_any():
                        size += len(part)
            except TimeoutError:
                pass
            return size

        await asyncio.gather(*(follow() for _ in range(VIEWERS)))


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--look", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look is not None:
        asyncio.run(look(options.look))
        return
    server = subprocess.Popen([sys.executable, "-m", "quire", "serve", "--port", str(PORT)], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{URL}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
        process = psutil.Process(server.pid)
        asyncio.run(work(options.requests, options.tokens))
        found: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds):
            for watched in (False, True) if number % 2 else (True, False):
                viewers = None
                if watched:
                    viewers = subprocess.Popen([sys.executable, "-m", "benchmarks.page_cost", "--look", "600"])
                    time.sleep(3)
                before = cpu_seconds(process)
                asyncio.run(work(options.requests, options.tokens))
                found[watched].append(cpu_seconds(process) - before)
                if viewers is not None:
                    viewers.terminate()
                    viewers.wait()
                    time.sleep(6)  # the observer ends
    finally:
        server.terminate()
        server.wait()
    more = median(b / a - 1 for a, b in zip(found[False], found[True], strict=True))
    print(
        f"CPU seconds of a round: {median(found[False]):.2f} unwatched, {median(found[True]):.2f} with {VIEWERS} "
        f"viewers; {100 * more:+.2f} %"
    )


if __name__ == "__main__":
    main()
