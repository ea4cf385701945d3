"""Compares `quire serve` with llama.cpp's own server on the same GGUF file, with 1, 4 and 16 HTTP clients.

    python benchmarks/side_by_side_http.py --gguf FILE --out DIR --xllamacpp PYTHON

Each client sends one streamed completion after another to /v1/completions: 128 token ids in, 64 out, greedy, ignoring
end-of-sequence. Both servers run with the same number of threads and slots for 16 requests, and alternate in rounds.
Every request of a round has its own prompt, so prefix caches do not help. Token counts come from the server's usage.
PYTHON is the interpreter of an environment with xllamacpp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import VOCAB, joules

HERE = Path(__file__).resolve().parent
TOKENS_IN = 128
TOKENS_OUT = 64
STREAMS = 16
MODEL = "model"
ENGINES = {"quire": "Quire", "xllamacpp": "llama.cpp's server"}
Sample = dict[str, Any]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def command_of(engine: str, a: argparse.Namespace, port: int) -> list[str]:
    context = TOKENS_IN + TOKENS_OUT + 16
    if engine == "xllamacpp":
        sizes = [str(a.threads), str(STREAMS), str(context)]
        return [a.xllamacpp, str(HERE / "peers" / "serve_xllamacpp.py"), str(a.gguf), str(port), *sizes]
    flags = [
        "--served-model-name",
        MODEL,
        "--max-model-len",
        str(context),
        "--max-num-seqs",
        str(STREAMS),
        "--cpu-isa",
        a.cpu_isa,
    ]
    flags += ["--kv-cache-memory-bytes", str(a.kv_cache_bytes), "--kv-cache-pretouch", *a.quire_args.split()]
    return [a.quire, "-m", "quire", "serve", str(a.gguf), "--port", str(port), *flags]


@contextmanager
def server(command: list[str], url: str, log: Path, threads: int, timeout_s: float) -> Iterator[float]:
    """Run it in its own process group until the block ends; yields the seconds until it was healthy.

    Raises RuntimeError if it exits or takes too long.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield asyncio.run(_until_healthy(url, process, timeout_s)) - started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _until_healthy(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> float:
    async with aiohttp.ClientSession() as session:
        for _ in range(int(timeout_s / 0.05)):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return time.perf_counter()
            await asyncio.sleep(0.05)
    raise RuntimeError("the server did not become healthy")


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[int, float]:
    """Send a request. Returns the tokens of the answer, and the seconds until the first event."""
    sampling = {"max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True}
    body = {"model": MODEL, "prompt": prompt, **sampling, "stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    first = 0.0
    usage = None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter() - started
            usage = json.loads(line[6:]).get("usage") or usage
    if usage is None or usage["completion_tokens"] != TOKENS_OUT:
        raise RuntimeError(f"an answer has the usage {usage} in place of {TOKENS_OUT} tokens")
    return usage["completion_tokens"], first


async def load(url: str, clients: int, requests: int, rng: random.Random) -> Sample:
    """clients send `requests` requests each, one after another."""
    prompts = [[[rng.randint(*VOCAB) for _ in range(TOKENS_IN)] for _ in range(requests)] for _ in range(clients)]
    # Each request has its own connection: llama.cpp's server closes used ones, sometimes too late to notice.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client(own: list[list[int]]) -> list[tuple[int, float]]:
            return [await complete(session, url, prompt) for prompt in own]

        before = joules()
        started = time.perf_counter()
        answers = [answer for of in await asyncio.gather(*map(client, prompts)) for answer in of]
        seconds = time.perf_counter() - started
        after = joules()
    tokens = sum(count for count, _ in answers)
    sample: Sample = {"output_tok_s": tokens / seconds, "first_s": median(first for _, first in answers)}
    if before:
        sample["joules_per_token"] = sum(after[name] - before[name] for name in before) / tokens
    return sample


def measure(a: argparse.Namespace) -> list[Sample]:
    samples = []
    engines = list(ENGINES)
    for number in range(1, a.rounds + 1):
        for engine in engines if number % 2 else reversed(engines):
            port = _free_port()
            url = f"http://127.0.0.1:{port}"
            log = a.out / f"{number}-{engine}.log"
            with server(command_of(engine, a, port), url, log, a.threads, a.timeout) as ready_s:
                asyncio.run(load(url, 1, 1, random.Random(0)))
                for clients in a.clients:
                    rng = random.Random(f"{number} {clients}")
                    sample = asyncio.run(load(url, clients, a.requests, rng))
                    samples.append(
                        {"round": number, "engine": engine, "clients": clients, "ready_s": ready_s, **sample}
                    )
                    print(json.dumps(samples[-1]), flush=True)
                    with (a.out / "http.jsonl").open("a") as file:
                        file.write(json.dumps(samples[-1]) + "\n")
    return samples


def table(samples: list[Sample]) -> str:
    lines = ["| clients | Quire, tokens a second | llama.cpp's server | ratio | first token, s | llama.cpp's |"]
    lines.append("|---|---|---|---|---|---|")
    for clients in sorted({sample["clients"] for sample in samples}):

        def middle(engine: str, metric: str, clients: int = clients) -> float:
            return median(s[metric] for s in samples if (s["engine"], s["clients"]) == (engine, clients))

        ours, theirs = (middle(engine, "output_tok_s") for engine in ENGINES)
        first, others_first = (middle(engine, "first_s") for engine in ENGINES)
        cells = f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | {first:.2f} | {others_first:.2f}"
        lines.append(f"| {clients} | {cells} |")
    ready = [median(s["ready_s"] for s in samples if s["engine"] == engine) for engine in ENGINES]
    return "\n".join(lines) + "\n\nSeconds until healthy: Quire {:.1f}, llama.cpp's server {:.1f}.\n".format(*ready)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gguf", type=Path, required=True, metavar="FILE", help="the model")
    add("--out", type=Path, required=True, metavar="DIR", help="where samples and the table go")
    add("--xllamacpp", required=True, metavar="PYTHON", help="the interpreter that has xllamacpp")
    add("--quire", default=sys.executable, metavar="PYTHON", help="the interpreter that has Quire (default: this one)")
    add("--clients", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="(default: 1 4 16)")
    add("--requests", type=int, default=2, metavar="N", help="of each client (default: 2)")
    add("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of either server (default: all cores)")
    add("--kv-cache-bytes", type=int, default=1 << 29, metavar="N", help="Quire's KV cache (default: 512 MiB)")
    add("--cpu-isa", default="native", metavar="NAME", help="instruction set of Quire's kernels")
    add("--timeout", type=float, default=300, metavar="S", help="of a server's start (default: 300)")
    add("--quire-args", default="", metavar="FLAGS", help="more flags for Quire, in one word")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    text = table(measure(a))
    (a.out / "http.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
