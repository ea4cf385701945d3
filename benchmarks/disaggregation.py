"""Measures how much long prompts delay the tokens of other requests. Compares two servers that share requests with one
that computes prompts and one that generates.

    python -m benchmarks.disaggregation --rounds 3          # as root: it makes two network namespaces

Each server has its own network namespace and core; a virtual link joins the namespaces. The model has
SmolLM2-135M's shapes and random weights. Some requests are generating when prompts of 4,000 tokens begin to arrive,
several at a time. This measures the gaps between tokens of these requests, and the time to first token of the long
prompts. Both setups get the same requests, interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from quire.checkpoints.hub import bundled_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True,
    "eos_token_id": 2,
}  # fmt: skip
PROMPT = 4000
ANSWERS = 4
ANSWER_TOKENS = 500
ADDRESSES = "10.98.0.1", "10.98.0.2"


# ---- the client, which runs in a namespace


async def stream(session: Any, url: str, prompt: list[int], tokens: int) -> list[float]:
    """Return the times at which the tokens arrived."""
    times = []
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


async def measure(url: str, prompts: int, seed: int) -> dict[str, float]:
    import aiohttp

    dice = random.Random(seed)
    limit = asyncio.Semaphore(3)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(100, 4000) for _ in range(count)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def ask(prompt: list[int]) -> float:
            async with limit:
                began = time.perf_counter()
                return (await stream(session, url, prompt, 2))[0] - began

        answers = [asyncio.create_task(stream(session, url, tokens(40), ANSWER_TOKENS)) for _ in range(ANSWERS)]
        await asyncio.sleep(2)
        began = time.perf_counter()
        firsts = await asyncio.gather(*(ask(tokens(PROMPT)) for _ in range(prompts)))
        seconds = time.perf_counter() - began
        gaps = []
        for task in answers:
            times = await task
            gaps += [b - a for a, b in pairwise(times) if began < b < began + seconds]
    gaps.sort()
    return {
        "longest pause, s": gaps[-1],
        "99 % of pauses, s": gaps[int(0.99 * len(gaps))],
        "median pause, s": median(gaps),
        "first token of a long prompt, s": median(firsts),
        "long prompts/s": prompts / seconds,
    }


# ---- the servers


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    names = [f"quire-bench-{os.getpid()}-{number}" for number in (0, 1)]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", "quire0", "netns", names[0], "type", "veth", "peer", "name", "quire1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"quire{number}")
            for device in ("lo", f"quire{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


class Servers:
    def __init__(self, names: list[str], folder: Path) -> None:
        """folder: for the model, the secret and the logs."""
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model() / name, folder / "model")
        (folder / "secret").write_text(secrets.token_hex(32))
        (folder / "secret").chmod(0o600)
        self.names = names
        self.folder = folder
        self.processes = list[subprocess.Popen[bytes]]()
        self.cores = sorted(os.sched_getaffinity(0))
        self.variables: dict[str, str] = {}

    def start(self, number: int, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.variables}
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        pinned = ["taskset", "-c", str(self.cores[number % len(self.cores)])]
        command = ["ip", "netns", "exec", self.names[number], *pinned, sys.executable, "-m", "quire", *arguments]
        self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def serve(self, number: int, port: int, *more: str, **transfer: Any) -> None:
        if transfer:
            more += ("--kv-transfer-config", json.dumps(transfer), "--cluster-secret-file", str(self.folder / "secret"))
        self.start(
            number,
            "serve",
            str(self.folder / "model"),
            "--load-format",
            "dummy",
            "--host",
            ADDRESSES[number],
            "--port",
            str(port),
            "--num-gpu-blocks-override",
            "3000",
            "--max-num-seqs",
            "16",
            *more,
        )

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url is not None:
        print(json.dumps(asyncio.run(measure(options.url, options.prompts, options.seed))))
        return
    with tempfile.TemporaryDirectory() as path, namespaces() as names:
        folder = Path(path)
        found: dict[str, list[dict[str, float]]] = {"together": [], "apart": []}
        servers = Servers(names, folder)
        try:
            for number in (0, 1):
                servers.serve(number, 8001)
            servers.serve(0, 8002, kv_role="kv_producer", kv_ip=ADDRESSES[0])
            servers.serve(1, 8002, kv_role="kv_consumer")
            first, second = (f"http://{address}" for address in ADDRESSES)
            at = ["route", "--host", ADDRESSES[1], "--port"]
            servers.start(1, *at, "8003", "--backend", f"{first}:8001", f"{second}:8001")
            servers.start(1, *at, "8004", "--prefill", f"{first}:8002", "--backend", f"{second}:8002")
            for port in ("8003", "8004"):
                wait_for(names[1], f"{second}:{port}/health")
            for number in range(options.rounds):
                for name in list(found)[:: -1 if number % 2 else 1]:
                    url = f"{second}:{8003 if name == 'together' else 8004}"
                    found[name].append(run_client(names[1], url, options.prompts, number))
                    print(
                        number + 1, name, {key: round(value, 3) for key, value in found[name][-1].items()}, flush=True
                    )
        finally:
            servers.close()
            for log in sorted(folder.glob("*.log")):
                if b"Traceback" in (text := log.read_bytes()):
                    print(text.decode(errors="replace"))
    print("| | together | apart | ratio |\n|---|---|---|---|")
    for key in found["together"][0]:
        values = [[result[key] for result in found[name]] for name in ("together", "apart")]
        ratio = median(a / b for a, b in zip(*reversed(values), strict=True))
        print(f"| {key} | {median(values[0]):.3f} | {median(values[1]):.3f} | {ratio:.3f} |")


def run_client(namespace: str, url: str, prompts: int, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.disaggregation", "--url", url, "--prompts", str(prompts)]
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *command, "--seed", str(seed)], stdout=subprocess.PIPE, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def wait_for(namespace: str, url: str) -> None:
    ask = ["ip", "netns", "exec", namespace, sys.executable, "-c"]
    ask.append(f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)")
    end = time.monotonic() + 120
    while subprocess.run(ask, capture_output=True).returncode:
        if time.monotonic() > end:
            raise TimeoutError(f"{url} does not answer")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
