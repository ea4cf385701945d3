"""Measures the cost of the HTTP API: N streams through `quire serve`, compared with the same requests offline.

    python benchmarks/api_cost.py [MODEL] [--streams 64] [--tokens 64] [--rounds 3]

Rounds alternate. The client shares the machine's cores with the server, so its own cost is included.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import sys
import time

import aiohttp

from quire import LLM, SamplingParams


async def stream(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], tokens: int) -> int:
    """Return the number of events."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        return (await response.read()).count(b"data: ") - 1


async def served(url: str, model: str, prompts: list[list[int]], tokens: int) -> float:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(stream(session, url, model, prompt, tokens) for prompt in prompts))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = {"max_model_len": 512, "max_num_seqs": arguments.streams, "enable_prefix_caching": False}
    flags = [
        part
        for name, value in options.items()
        if value is not False
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "quire", "serve", *([arguments.model] if arguments.model else []), "--port", "0"]
    server = subprocess.Popen(
        [*command, "--served-model-name", "m", "--no-enable-prefix-caching", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"Serving at (\S+): ", line)))
        llm = LLM(arguments.model, **options)
        params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
        draw = random.Random(0)
        seconds = {"offline": [], "served": []}
        for number in range(arguments.rounds + 1):  # the first warms up
            prompts = [[draw.randrange(4, 1000) for _ in range(32)] for _ in range(arguments.streams)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            offline = time.perf_counter() - started
            online = asyncio.run(served(url, "m", prompts, arguments.tokens))
            if number:
                seconds["offline"].append(offline)
                seconds["served"].append(online)
                print(f"round {number}: offline {offline:.2f} s, served {online:.2f} s, {online / offline - 1:+.1%}")
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rate = arguments.streams * arguments.tokens / medians["offline"]
        print(f"medians: offline {rate:.0f} tok/s; served {medians['served'] / medians['offline'] - 1:+.1%} time")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
