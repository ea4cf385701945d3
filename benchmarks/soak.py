"""Full load of every kind of request for a long time: the server must answer, and its memory must stay flat.

    python benchmarks/soak.py [MODEL] [--minutes 30] [--clients 64] [--json FILE]

Clients ask for completions and chats, streamed and not, with logprobs, n, stop strings and seeds, long and short; some
leave in the middle, some ask for what is wrong. Every 10 seconds the memory of both processes is noted. In the end
nothing may run, wait or hold a block, and no answer may have been a 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

WORDS = "once upon a time there was an old engine that read books to the cat and the moon in the garden".split()


def some_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(draw.choices(WORDS, k=draw.choice([3, 20, 100, 400])))
    body: dict[str, Any] = {"max_tokens": draw.choice([1, 10, 50, 200]), "stream": draw.random() < 0.6}
    body |= draw.choice([{"temperature": 0}, {"temperature": 1.0, "seed": draw.randrange(99)}, {"top_p": 0.9, "n": 2}])
    body |= draw.choice([{}, {}, {"stop": ["moon", "cat"]}, {"frequency_penalty": 0.5}, {"ignore_eos": True}])
    if body.get("n"):
        body["temperature"] = 0.8
    if draw.random() < 0.5:
        body |= draw.choice([{}, {"logprobs": 3}, {"echo": True}])
        return "/v1/completions", {**body, "prompt": text}
    body |= draw.choice([{}, {"logprobs": True, "top_logprobs": 2}])
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


async def client(session: aiohttp.ClientSession, url: str, number: int, end: float, seen: Counter[str]) -> None:
    draw = random.Random(number)
    while time.monotonic() < end:
        path, body = some_request(draw)
        if draw.random() < 0.05:
            body["temperature"] = "hot"
        leaves = draw.random() < 0.1
        try:
            async with session.post(url + path, json=body) as response:
                seen[str(response.status)] += 1
                if leaves:
                    await asyncio.wait_for(response.content.readany(), 0.5)
                    response.close()
                    seen["left"] += 1
                    continue
                text = await response.text()
                if body["stream"] and response.status == 200:
                    seen["broken" if '"error"' in text or not text.endswith("data: [DONE]\n\n") else "streamed"] += 1
                seen["tokens"] += text.count('"text"') + text.count('"content"') if response.status == 200 else 0
        except TimeoutError:
            seen["left"] += 1
        except aiohttp.ClientError as error:
            seen[type(error).__name__] += 1


async def run(url: str, server: psutil.Process, minutes: float, clients: int) -> tuple[Counter[str], list[list[float]]]:
    end, seen, samples = time.monotonic() + 60 * minutes, Counter[str](), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(client(session, url, i, end, seen)) for i in range(clients)]
        started = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(min(10, max(0.1, end - time.monotonic())))
            core = max(server.children(), key=lambda p: p.memory_info().rss)
            sizes = [process.memory_info().rss / 2**20 for process in (server, core)]
            samples.append([round(time.monotonic() - started, 1), *(round(size, 1) for size in sizes)])
            print(
                f"{samples[-1][0]:7.0f} s  API {sizes[0]:7.1f} MiB  core {sizes[1]:7.1f} MiB  {dict(seen)}", flush=True
            )
        await asyncio.wait_for(asyncio.gather(*tasks), 120)
    return seen, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", *([arguments.model] if arguments.model else []), "--port", "0"]
    server = subprocess.Popen(
        [*command, "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "48"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"Serving at (\S+): ", line)))
        drain = subprocess.Popen(
            ["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL
        )  # the log must not fill a pipe
        seen, samples = asyncio.run(run(url, psutil.Process(server.pid), arguments.minutes, arguments.clients))
        time.sleep(2)
        import urllib.request

        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        left = {
            name: float(re.search(rf"^quire:{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)[1])  # type: ignore[index]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        }
        half = samples[len(samples) // 4 :]  # after the warm-up
        growth = [half[-1][i] / half[0][i] - 1 for i in (1, 2)]
        print(f"answers {dict(seen)}\nleft {left}")
        print(f"growth after the first quarter: API {growth[0]:+.1%}, core {growth[1]:+.1%}")
        if arguments.json:
            arguments.json.write_text(json.dumps({"answers": seen, "left": left, "growth": growth, "samples": samples}))
        drain.terminate()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
