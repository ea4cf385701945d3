"""Measures the gain from reading keys and values layer by layer during a step instead of at its end.

    python -m benchmarks.kv_layers --rounds 5               # as root: it makes two network namespaces

As in benchmarks.disaggregation, one server computes prompts and another one generates, each on its own core, with
SmolLM2-135M's shapes. Prompts have 2,000 tokens, which is one step. The link between the namespaces is throttled, so
that transferring a prompt's blocks takes 0.25, 0.5, 1 or 2 times as long as the step. The time from a request to its
first token is measured at two consumers, interleaved. One reads the layers in eight parts, as Quire does; the other
waits for the whole step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.disaggregation import ADDRESSES, Servers, namespaces, stream, wait_for

PROMPT = 2000
BYTES = PROMPT // 16 * 16 * 30 * 2 * 3 * 64 * 2  # bfloat16
SHARES = (0.25, 0.5, 1.0, 2.0)
WHOLE_STEPS = "from quire.transfer import store\nstore._PARTS = 1\n"


async def measure(urls: list[str], rounds: int) -> list[list[float]]:
    """Return the seconds to the first token, for each URL and round."""
    import aiohttp

    found: list[list[float]] = [[] for _ in urls]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for number in range(rounds):
            for place in sorted(range(len(urls)), reverse=bool(number % 2)):
                prompt = [random.randrange(100, 4000) for _ in range(PROMPT)]
                began = time.perf_counter()
                found[place].append((await stream(session, urls[place], prompt, 2))[0] - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--urls", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.urls is not None:
        print(json.dumps(asyncio.run(measure(options.urls, options.rounds))))
        return
    with tempfile.TemporaryDirectory() as path, namespaces() as names:
        folder = Path(path)
        servers = Servers(names, folder)
        try:
            servers.serve(0, 8002, "--max-num-batched-tokens", str(PROMPT), kv_role="kv_producer", kv_ip=ADDRESSES[0])
            servers.serve(1, 8002, kv_role="kv_consumer", kv_connector="TcpConnector")
            (folder / "sitecustomize.py").write_text(WHOLE_STEPS)  # read by all processes of this server
            servers.variables = {"PYTHONPATH": str(folder)}
            servers.serve(1, 8003, kv_role="kv_consumer", kv_connector="TcpConnector")
            servers.variables = {}
            first, second = (f"http://{address}" for address in ADDRESSES)
            at = ["route", "--host", ADDRESSES[1], "--port"]
            for port in (8002, 8003):
                servers.start(1, *at, str(port + 2), "--prefill", f"{first}:8002", "--backend", f"{second}:{port}")
            for port in (8004, 8005):
                wait_for(names[1], f"{second}:{port}/health")
            run_client(names[1], [f"{first}:8002"], 1)
            step = median(run_client(names[0], [f"{first}:8002"], 3)[0])
            print(f"A prompt of {PROMPT:,} tokens is computed in {step:.2f} s, and has {BYTES / 1e6:.0f} MB\n")
            print("| link, MB/s | of the step | by steps, s | by layers, s | ratio |\n|---|---|---|---|---|")
            urls = [f"{second}:8004", f"{second}:8005"]
            run_client(names[1], urls, 1)
            for share in SHARES:
                rate = BYTES / (share * step)
                limit(names[0], rate)
                layers, steps = run_client(names[1], urls, options.rounds)
                ratio = median(a / b for a, b in zip(steps, layers, strict=True))
                print(
                    f"| {rate / 1e6:.0f} | {share} | {median(steps):.2f} | {median(layers):.2f} | {ratio:.2f} |",
                    flush=True,
                )
        finally:
            servers.close()


def limit(namespace: str, rate: float) -> None:
    """rate: bytes per second that the first namespace may send."""
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", "quire0", "root", "tbf"]
    subprocess.run([*command, "rate", f"{int(8 * rate)}bit", "burst", "256kb", "limit", "4mb"], check=True)


def run_client(namespace: str, urls: list[str], rounds: int) -> list[list[float]]:
    command = [sys.executable, "-m", "benchmarks.kv_layers", "--rounds", str(rounds), "--urls", *urls]
    done = subprocess.run(["ip", "netns", "exec", namespace, *command], stdout=subprocess.PIPE, check=True)
    result: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
